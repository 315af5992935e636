#!/bin/sh
# Regenerates this folder; WORKLOADS holds the trace files. Finished cases in runs.jsonl are kept, so it may be
# interrupted and started again. About 10 s of one core per case (none: 3 s).
set -e
: "${WORKLOADS:=../shared/workloads}"
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
HERE=results/2026-11-21-simulation
TUNED=adaserve:budget=144,d_max=4,d_min=2
simulate() { nice -n 10 ${PYTHON:-python} -m adaserve.scheduler.simulator run --baseline-ms 30 --no-records "$@"; }

# 1. The paper's traces and hardware. Tuning used rps3.2 only.
paper() {
  simulate --trace $WORKLOADS/adaserve_rps3.2.jsonl --trace $WORKLOADS/adaserve_rps4.0.jsonl \
    --trace $WORKLOADS/adaserve_rps2.6.jsonl --trace $WORKLOADS/adaserve_prop0.3.jsonl --trace $WORKLOADS/adaserve_prop0.7.jsonl \
    --policy priced --policy adaserve=$TUNED --policy turbospec --policy chain-4 --policy none \
    --seeds "$1" --out $HERE/paper
}
# 2. Never looked at while tuning: Azure's conversation trace, bursty synthetic arrivals, another model.
held_out() {
  simulate --trace $WORKLOADS/azure_conv_0-1500s.csv --speedup 0.75 --seeds "$1" \
    --policy priced --policy adaserve=$TUNED --policy turbospec --policy chain-4 --out $HERE/azure
  simulate --trace synthetic:1200:3.0:4 --seeds "$1" \
    --policy priced --policy adaserve=$TUNED --policy turbospec --policy chain-4 --out $HERE/bursty
}
# 3. Each ingredient on and off, on the overloaded trace.
ablation() {
  simulate --trace $WORKLOADS/adaserve_rps4.0.jsonl --seeds "$1" --out $HERE/ablation \
    --policy priced --policy priced-no-weights=priced:attain_weight=0 --policy priced-no-calibration=priced:calibrate=False \
    --policy priced-prefill-in-price=priced:price_prefill=True --policy priced-width1=priced:w_max=1 \
    --policy priced-early-stop=priced:early_stop=True --policy priced-triage4=priced:triage_every=4 \
    --policy priced-B144=priced:budget=144 --policy priced-untracked=priced:track_latency=False \
    --policy adaserve=$TUNED --policy adaserve-untuned=adaserve --policy adaserve-v1 \
    --policy global-greedy=global-greedy:budget=144,d_max=4,d_min=2 --policy equal-greedy=equal-greedy:budget=144,d_max=4,d_min=2 \
    --policy turbospec --policy turbospec-skip=turbospec:turbo_skip_prefill=True --policy fixed-tree --policy chain-3 --policy chain-6 --policy fcfs --policy stta --policy sep-pipe
}
for seeds in 0 0,1 0,1,2; do
  paper $seeds
  held_out $seeds
  ablation $seeds
done
