#!/bin/sh
# Regenerates this folder: run.sh [fresh|tuning|paper|limit|ablation|held_out|fleet|all] [seeds]; WORKLOADS holds the traces.
# Finished cases in runs.jsonl are kept, so it may be interrupted and started again. 4 to 8 s of one core per case.
set -e
: "${WORKLOADS:=../shared/workloads}"
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
HERE=results/2026-11-21-simulation
TUNED=budget=144,d_max=4,d_min=2
simulator() { ${PYTHON:-python} -m adaserve.scheduler.simulator "$@"; }
simulate() { simulator run --baseline-ms 30 --no-records "$@"; }
compare="--policy priced --policy adaserve=adaserve:$TUNED --policy turbospec --policy chain-4"

# 0. The baseline gets its settings: another seed of the trace that the ablation uses.
tuning() {
  grid=""
  for B in 112 128 144 168; do for d in 3 4 5; do grid="$grid --policy B$B-d$d=adaserve:budget=$B,d_max=$d,d_min=2"; done; done
  simulate --trace $WORKLOADS/adaserve_rps4.0.jsonl --seeds 7 $grid --policy B144-d4-w2=adaserve:$TUNED,w_max=2 \
    --policy B144-d4-dmin1=adaserve:budget=144,d_max=4,d_min=1 --policy B512-d8=adaserve:budget=512 --out $HERE/tuning
}
# 1. The paper's traces and hardware.
paper() {
  simulate --trace $WORKLOADS/adaserve_rps4.0.jsonl --trace $WORKLOADS/adaserve_rps3.2.jsonl \
    --trace $WORKLOADS/adaserve_rps2.6.jsonl --trace $WORKLOADS/adaserve_prop0.3.jsonl --trace $WORKLOADS/adaserve_prop0.7.jsonl \
    $compare --policy none --seeds "$1" --out $HERE/paper
}
# 2. What is left: policies that know the truth.
limit() {
  simulate --trace $WORKLOADS/adaserve_rps4.0.jsonl --policy priced --policy true-probabilities --policy clairvoyant \
    --policy adaserve=adaserve:$TUNED --seeds "$1" --out $HERE/limit
}
# 3. Each ingredient on and off, on the overloaded trace.
ablation() {
  simulate --trace $WORKLOADS/adaserve_rps4.0.jsonl --seeds "$1" --out $HERE/ablation \
    --policy priced --policy priced-no-weights=priced:attain_weight=0 --policy priced-no-calibration=priced:calibrate=False \
    --policy priced-untracked=priced:track_latency=False --policy priced-prefill-in-price=priced:price_prefill=True --policy priced-no-queue-price=priced:queue_price=0 \
    --policy priced-width1=priced:w_max=1 --policy priced-B144=priced:budget=144 \
    --policy priced-early-stop=priced:early_stop=True --policy priced-triage4=priced:triage_every=4 \
    --policy adaserve=adaserve:$TUNED --policy adaserve-untuned=adaserve:budget=512 --policy adaserve-v1=adaserve-v1:$TUNED \
    --policy global-greedy=global-greedy:$TUNED --policy equal-greedy=equal-greedy:$TUNED \
    --policy turbospec --policy turbospec-skip=turbospec:turbo_skip_prefill=True \
    --policy fixed-tree --policy chain-3 --policy chain-6 --policy fcfs --policy stta --policy sep-pipe
}
# 4. Never looked at while tuning: Azure's traces, bursty synthetic arrivals, other hardware and models.
held_out() {
  simulate --trace synthetic:1000:3.2:4 --seeds "$1" $compare --out $HERE/bursty
  simulate --trace synthetic:1000:3.5 --slo-config $HERE/tight.yaml --seeds "$1" $compare --out $HERE/tight
  simulator run --no-records --trace synthetic:1000:9 --model llama-3.1-8b --gpu l40s --tp 1 --seeds "$1" $compare --out $HERE/l40s-8b
  simulator run --no-records --trace synthetic:1000:13 --model qwen2.5-32b --gpu h100 --tp 2 --seeds "$1" $compare --out $HERE/h100-32b
  simulate --trace $WORKLOADS/azure_conv_0-1500s.csv --speedup 0.5 --seeds "$1" $compare --out $HERE/azure-conv
  simulate --trace $WORKLOADS/azure_code_0-1500s.csv --speedup 0.5 --seeds "$1" $compare --out $HERE/azure-code
}
# 5. A million requests on 100 replicas, and a capacity answer.
fleet() {
  simulator fleet --trace synthetic:1000000:300 --replicas 100 --baseline-ms 30 --out $HERE/fleet.json
  simulator capacity --trace synthetic:30000:40 --target 0.95 --baseline-ms 30 --out $HERE/capacity.json
}
# What was made with other code of `priced` goes; the baselines stay.
fresh() {
  for f in "$HERE"/*/runs.jsonl; do
    grep -vE '"policy": "(priced[^"]*|true-probabilities|clairvoyant)"' "$f" > "$f.kept" || true
    mv "$f.kept" "$f"
  done
}
seeds=${2:-0,1,2}
case ${1:-all} in
  all) tuning; for s in 0 0,1 0,1,2; do paper $s; limit $s; ablation $s; held_out $s; done; fleet ;;
  tuning) tuning ;;
  fleet) fleet ;;
  fresh) fresh ;;
  small) for n in 1 4; do ${PYTHON:-python} $HERE/small_batches.py --requests $n --tokens 2500; done ;;
  *) "$1" "$seeds" ;;
esac
