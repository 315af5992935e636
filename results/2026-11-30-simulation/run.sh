#!/bin/sh
# Makes what this folder holds, in the folder where it is started:
# run.sh [tuning|paper|gate|limit|ablation|held_out|azure|capacity|all] [seeds]
# TRACES is a folder with the traces of AdaServe's artifact and the first 25 minutes of Azure's traces of 2023.
# It may be interrupted and started again: finished simulations are kept. About 8 s of one core each.
set -e
: "${TRACES:?set TRACES to a folder with the traces}"
TRACES=$(cd "$TRACES" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
seeds=${2:-x3}
tuned=budget=144,d_max=4,d_min=2
policies="--policy priced --policy adaserve=adaserve:$tuned --policy turbospec --policy adaptive-verify-4 --policy chain-4"

simulate() { # simulate FOLDER OPTIONS: without what is large and can be drawn again
  folder=$1
  shift
  adaserve simulate run --no-records --out "$folder" "$@"
  rm -f "$folder/summary.json" "$folder/timeline.png" "$folder/reliability.png"
}
each() { for name in "$@"; do printf -- ' --trace %s/adaserve_%s.jsonl' "$TRACES" "$name"; done; }

# Settings for `adaserve`, on a seed that nothing else uses.
tuning() {
  grid=
  for B in 112 128 144 168; do
    for d in 3 4 5; do grid="$grid --policy B$B-d$d=adaserve:budget=$B,d_max=$d,d_min=2"; done
  done
  simulate tuning --baseline-ms 30 $(each rps4.0) --seeds 7 $grid --policy B512-d8=adaserve:budget=512 \
    --policy B144-d4-w2=adaserve:$tuned,w_max=2 --policy B144-d4-dmin1=adaserve:budget=144,d_max=4,d_min=1
}
# The paper's traces and hardware.
paper() {
  simulate paper --baseline-ms 30 $(each rps4.0 rps3.2 rps2.6 prop0.3 prop0.7) $policies --policy none --seeds "$seeds"
}
# Prompts alone, as in AdaServe's server: as they come, and with its gate.
gate() {
  simulate no-gate --baseline-ms 30 $(each rps4.0 rps3.2) $policies --seeds "$seeds" --prefill exclusive
  simulate gate --baseline-ms 30 $(each rps4.0 rps3.2) $policies --seeds "$seeds" --prefill exclusive \
    --order deadline --gate 1.1
}
# Policies that know what no server knows.
limit() {
  simulate limit --baseline-ms 30 $(each rps4.0) --seeds "$seeds" --policy priced --policy true-probabilities \
    --policy clairvoyant
}
# The parts of `priced`, and other policies, on the overloaded trace.
ablation() {
  simulate ablation --baseline-ms 30 $(each rps4.0) --seeds "$seeds" \
    --policy priced --policy priced-no-weights=priced:attain_weight=0 \
    --policy priced-no-calibration=priced:calibrate=False --policy priced-costs-as-given=priced:learn_costs=False \
    --policy priced-width-1=priced:w_max=1 --policy priced-B144=priced:budget=144 \
    --policy priced-early-stop=priced:early_stop=True --policy adaserve=adaserve:$tuned \
    --policy adaserve-B512=adaserve:budget=512 --policy adaserve-v1=adaserve-v1:$tuned \
    --policy global-greedy=global-greedy:$tuned --policy equal-greedy=equal-greedy:$tuned --policy urgency-4 \
    --policy fixed-tree --policy chain-3 --policy chain-6 --policy fcfs --policy stta --policy sep-pipe
}
# Loads, SLOs and hardware that nothing was tuned on.
held_out() {
  simulate bursty --baseline-ms 30 --trace synthetic:1000:3.2:4 --seeds "$seeds" $policies
  simulate tight --baseline-ms 30 --trace synthetic:1000:3.5 --slo-config "$here/tight.yaml" --seeds "$seeds" $policies
  simulate l40s-8b --trace synthetic:1000:9 --model llama-3.1-8b --gpu l40s --tp 1 --seeds "$seeds" $policies
  simulate h100-32b --trace synthetic:1000:13 --model qwen2.5-32b --gpu h100 --tp 2 --seeds "$seeds" $policies
}
# Half an hour of traffic: minutes of one core for each simulation.
azure() {
  for kind in conv code; do
    simulate "azure-$kind" --baseline-ms 30 --trace "$TRACES/azure_${kind}_0-1500s.csv" --loads 0.25 --seeds 0 $policies
  done
}
capacity() {
  adaserve simulate capacity --trace synthetic:30000:40 --target 0.95 --baseline-ms 30 --out capacity.json
}
case ${1:-all} in
  all) for part in tuning paper gate limit ablation held_out azure capacity; do $part; done ;;
  *) "$1" ;;
esac
