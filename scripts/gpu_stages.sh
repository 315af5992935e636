#!/usr/bin/env bash
# The first half hour on a GPU host, one stage or a few at a time, from the repository's root:
#
#   scripts/gpu_stages.sh STAGE... [--device cpu]
#
#   assemble    unpack the bundle's parts (gpu-bundle/) into site/, with this working tree's code  1 min
#   facts       what the host has                                                                  1 min
#   kernels     compile kernels side by side and compare them; make the large pair meanwhile       1-4 min
#   smoke       the small pair: AdaServe's greedy text against SGLang's                            4 min
#   plain       the large pair on SGLang without speculation: reference outputs, TPOT              3-4 min
#   adaserve    exactness, TPOT, cost of verification, share outside of the models                 5-7 min
#   standalone  SGLang's own speculation with topk 1 and 2                                         5-7 min
#   profile     torch profiles at batch 1 and 32                                                   3-4 min
#   mixed       mixed SLOs at 1.3 of plain decoding's capacity: priced against STANDALONE          6-8 min
#
# Minutes are guesses, one to three of them for every server that starts; docs/gpu-internals.md has those of an H200.
# Stages from plain to mixed that are named together share their servers: adaserve and profile start one.
# If AdaServe does not start, or its text is not SGLang's, and the small pair is not right either, parts of it are
# turned off until it is: our attention, CUDA graphs, then overlap as well. That says where to look, and all stages
# go on without these parts.
#
# The stages end after DEADLINE seconds (560) in all; what was measured by then is saved, and the same command
# goes on from there. After a stage that fails the next ones still run, except after assemble and smoke.
# Stages can be run again: finished work is not repeated, unless AGAIN=1 asks for it.
#
# Everything is saved below .local/gpu-stages/. If $OUT is set, it always holds the results so far, in at
# most eight files: gpu-stages.tar.gz with everything but traces, the latest gpu-check.json, and the traces.
#
# Settings, as variables before the command:
#   PAIR=small        the small pair throughout
#   DRAFT=eagle3      the embedded EAGLE-3 head in place of the draft model, against SGLang's EAGLE3
#   ATTENTION=triton  leave FlashInfer out
#   FLAGS             more flags for all servers; FLAGS= for none, not even those that an earlier stage found necessary
#   SIZES             other sizes, such as SIZES="--batches 1,8 ..."; the same in all stages
#   EVERY=1           also kernels that the embedded pairs do not use (bf16, heads of 128 dimensions)
#   TOGETHER=1        start the servers of a check side by side before any of them is measured. The GPU must have
#                     room for all: 140 GB for those of the large pair, each with a smaller KV cache
#   LIMIT             seconds (240) for each of: compilers, making the pair, a server's start, a stage of the check
#   PYTHON            the interpreter
set -uo pipefail
cd "$(dirname "$0")/.."

stages=() device=cuda
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=${2:?--device needs cuda or cpu}; shift ;;
    *) stages+=("$1") ;;
  esac
  shift
done
DEADLINE=${DEADLINE:-560} LIMIT=${LIMIT:-240} # seconds; bash counts those since the start in SECONDS
work=$PWD/.local/gpu-stages
mkdir -p "$work"
# Compilers keep what they made below HOME, which some hosts lack, or have as read-only.
if [ ! -w "${HOME:-}" ]; then
  export HOME=$PWD/.local/home
  mkdir -p "$HOME"
fi
# What an earlier stage found out holds unless the environment says otherwise.
given_attention=${ATTENTION:-} given_pair=${PAIR:-} given_home=${CUDA_HOME:-}
given_ops=${SGLANG_FORCE_FUSED_OP_BACKEND:-} given_flags=${FLAGS-as before}
settle() {
  ATTENTION= PAIR= CUDA_HOME= SGLANG_FORCE_FUSED_OP_BACKEND= FLAGS=
  [ -f "$work/settings" ] && . "$work/settings"
  [ "$given_flags" = "as before" ] || FLAGS=$given_flags
  ATTENTION=${given_attention:-${ATTENTION:-auto}} PAIR=${given_pair:-${PAIR:-large}}
  CUDA_HOME=${given_home:-${CUDA_HOME:-}}
  SGLANG_FORCE_FUSED_OP_BACKEND=${given_ops:-${SGLANG_FORCE_FUSED_OP_BACKEND:-}}
  [ "$device" = cuda ] || PAIR=small
  # What kernels are compiled with, and what SGLang uses in their place where they cannot be (see facts).
  local name
  for name in CUDA_HOME SGLANG_FORCE_FUSED_OP_BACKEND; do
    if [ -n "${!name}" ]; then export "$name"; else unset "$name"; fi
  done
}
remember() { # remember NAME [VALUE]: for this stage and the later ones; without a value, what was said before goes
  touch "$work/settings"
  sed -i "/^$1=/d" "$work/settings"
  if [ $# -gt 1 ]; then printf '%s=%q\n' "$1" "$2" >>"$work/settings"; fi
  settle
}
settle
with_torch() { # the interpreter that has PyTorch: on some hosts python is another one, or is not there
  local name
  for name in python python3; do
    "$name" -c 'import importlib.util as u; exit(u.find_spec("torch") is None)' >/dev/null 2>&1 && break
  done
  echo "$name"
}
PYTHON=${PYTHON:-$(with_torch)}

# Without bytecode on the disk every process of every server compiles SGLang once more.
unset PYTHONDONTWRITEBYTECODE
# Without PYTHONSAFEPATH the folder adaserve/ here would be found before the installed package.
export PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 COLUMNS=${COLUMNS:-120}
if [ "$device" = cuda ]; then
  export PYTHONPATH=$PWD/site${PYTHONPATH:+:$PYTHONPATH}
  export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
  # FlashInfer asks other GPUs itself what they are.
  case $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null) in
    9.0* | "") export FLASHINFER_CUDA_ARCH_LIST=${FLASHINFER_CUDA_ARCH_LIST:-9.0a} ;;
  esac
  # SGLang's compiled radix tree was made for torch 2.14, and misreads the tensors of 2.11.
  export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python
  export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$PWD/.local/cache}
  # Without network the host's own name may not be found, and each look-up would wait for a name server.
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
fi
sizes=${SIZES:---mixed-seconds 10 --loads 1.3} # of one check: its stages must agree on them

say() { printf '\n== %s\n' "$*"; }

file_limit=$((16 << 20)) most_traces=5
small_enough() { [ "$(stat -c %s "$1")" -le "$file_limit" ]; }
put() { # put FILE NAME: into $OUT at once or not at all, since this may be ended at any time
  cp -p "$1" "$OUT/partial" && mv "$OUT/partial" "$OUT/$2"
}
keep() { # what the stages wrote, to where it is fetched from: few files, none of them deep
  [ -n "${OUT:-}" ] || return 0
  # A saver that was ended may leave a program behind that still writes: that has the lock until it ends.
  (flock 9; keep_alone) 9>"$work.lock"
}
keep_alone() {
  local report trace name without=('*/profiles')
  touch "$work.kept" # first: what is written meanwhile may be missed, and is newer
  for more in '' './*/mixed-*' '*.log'; do # what is dropped where the rest is still too large
    [ -n "$more" ] && without+=("$more")
    tar -C "$work" "${without[@]/#/--exclude=}" -czf "$OUT/partial" . 2>/dev/null
    small_enough "$OUT/partial" && break
  done
  mv "$OUT/partial" "$OUT/gpu-stages.tar.gz"
  report=$({ ls -t "$work"/check-*/gpu-check.json; ls -t "$work"/smoke-*/gpu-check.json; } 2>/dev/null | head -1)
  [ -n "$report" ] && put "$report" gpu-check.json
  # shellcheck disable=SC2012
  ls -t "$work"/*/profiles/*/*.json* 2>/dev/null | head -"$most_traces" | while read -r trace; do
    name=${trace#"$work/"}
    name=trace-${name%%/*}-$(basename "$(dirname "$trace")").json${trace##*.json}
    if ! small_enough "$trace"; then
      echo "$trace has more than 16 MiB and stays on this host"
    elif [ ! -e "$OUT/$name" ] || [ "$trace" -nt "$OUT/$name" ]; then
      put "$trace" "$name"
    fi
  done
  # shellcheck disable=SC2012
  ls -t "$OUT"/trace-* 2>/dev/null | tail -n +$((most_traces + 1)) | while read -r trace; do rm -f "$trace"; done
}
keep_now_and_then() { # a command that is killed has no last word
  while sleep "${SAVE_EVERY:-10}" && kill -0 $$; do
    [ -e "$OUT/gpu-stages.tar.gz" ] && [ -z "$(find "$work" -newer "$work.kept" -print -quit)" ] || keep
  done
}
saver=
finish() {
  if [ -n "$saver" ]; then kill "$saver"; wait "$saver" 2>/dev/null; fi
  keep
}
within() { # within SECONDS COMMAND...: and not beyond the deadline; 124 or 137 = it did not end by itself
  local most=$1 left=$((DEADLINE - SECONDS - 10))
  shift
  [ "$left" -gt 0 ] || return 124
  timeout --signal=INT --kill-after=10 "$((left < most ? left : most))" "$@"
}

folder() { # of the checks that have such a name, with the parts that are in use
  echo "$1${DRAFT:+-$DRAFT}-$ATTENTION${SGLANG_FORCE_FUSED_OP_BACKEND:+-torch}${TOGETHER:+-together}${FLAGS//[ \/]/}"
}

gpu_check() { # gpu_check FOLDER SIZE SERVER:STAGE...
  local folder size=$2 words=(${AGAIN:+--again} ${TOGETHER:+--together} ${DRAFT:+--draft-kind "$DRAFT"}) cache=300000
  folder=$(folder "$1")
  shift 2
  for only in "$@"; do words+=(--only "$only"); done
  local flags="--adaserve-attention $ATTENTION"
  if [ "$device" = cuda ]; then
    local backend=flashinfer
    [ "$ATTENTION" = triton ] && backend=triton
    [ -z "${TOGETHER:-}" ] || cache=50000
    flags="--attention-backend $backend --sampling-backend pytorch --page-size 1 --chunked-prefill-size 2048"
    flags+=" --cuda-graph-bs-prefill 1 2 4 8 16 32 48 64 96 128 192 256 384 512 768 1024 1536 2048"
    flags+=" --max-total-tokens $cache --adaserve-attention $ATTENTION"
  fi
  # shellcheck disable=SC2086
  within "$DEADLINE" "$PYTHON" -m adaserve.cli gpu-check --device "$device" --size "$size" \
    --flags "$flags${FLAGS:+ $FLAGS}" \
    --out "$work/$folder" --stage-limit "$LIMIT" "${words[@]}" $sizes
}

done_or_stop() { # done_or_stop STATUS STAGE...: 3 is a missed target, which the next stages may explain
  local status=$1
  shift
  case $status in
    0 | 3) return 0 ;;
    124 | 137) say "$* is not done: the time was up. What was measured is saved; the same command goes on there" ;;
    *) say "$* is not done: the lines above say why, and the logs below $work. Mend that and run it again;" \
           "if it must wait, help lists the other stages" ;;
  esac
  return 2
}

own_code() { # the working tree may be newer than the bundle's wheel of it
  cp -r adaserve/. site/adaserve/
  for package in scheduler patches loadgen; do cp -r "$package/." "site/adaserve/$package/"; done
}

assemble() {
  if [ "$device" = cpu ]; then
    say "nothing to assemble for --device cpu: $PYTHON serves as it is. Next: facts"
    return
  fi
  within "$LIMIT" "$PYTHON" gpu-bundle/assemble.py --to site || {
    say "the bundle could not be unpacked: nothing else will run before it is"
    return 2
  }
  own_code
  within "$LIMIT" "$PYTHON" -c "import sgl_kernel, flashinfer, sglang, adaserve.scheduler; print('imports work')" || {
    say "a package does not import (the lines above name it), or takes too long. Nothing else will run before"
    return 2
  }
  say "next: facts"
}

facts() {
  within "$LIMIT" "$PYTHON" -m adaserve.bench.gpu_check.facts --toolkit "$PWD/.local/cuda" \
    >"$work/facts.json" 2>"$work/facts.log" || {
    cat "$work/facts.log"
    say "facts are not known: the lines above say why, or it took too long"
    return 2
  }
  local home
  home=$(sed -n 's/^ *"home": "\(.*\)",$/\1/p' "$work/facts.json")
  if [ -n "$home" ]; then remember CUDA_HOME "$home"; fi
  remember SGLANG_FORCE_FUSED_OP_BACKEND
  if [ "$device" = cuda ] && grep -q "^note: .* missing: SGLang" "$work/facts.log"; then
    remember SGLANG_FORCE_FUSED_OP_BACKEND torch
  fi
  cat "$work/facts.json"
  grep '^note: ' "$work/facts.log"
  say "next: kernels (with what the notes say)"
}

verdict() { # verdict KERNEL: the line of kernels.json that says whether it is right
  sed -n "/^ \"$1\": {/{n;p;}" "$work/kernels.json" 2>/dev/null
}

kernels() {
  local making=
  remember ATTENTION # an earlier run of this stage may have chosen, and it may not hold any more
  remember FLAGS
  remember PAIR
  rm -f "$work/kernels.json"
  if [ "$PAIR" = large ]; then
    within "$LIMIT" "$PYTHON" -m adaserve.bench.gpu_check.shapes ${DRAFT:-} >"$work/widening.log" 2>&1 &
    making=$!
  fi
  # A kernel that compiles until the deadline must not cost what the others found.
  local limit=$((DEADLINE - SECONDS - 30))
  limit=$((limit < 1 ? 1 : limit > LIMIT ? LIMIT : limit))
  within "$DEADLINE" "$PYTHON" -m adaserve.bench.gpu_check.kernels --device "$device" --out "$work/kernels.json" \
    --limit "$limit" ${EVERY:+--every} 2>"$work/kernels.log"
  local right=$?
  if [ $right = 124 ] || [ $right = 137 ]; then
    done_or_stop 124 kernels
    return
  fi
  if [ -n "$making" ] && ! wait "$making"; then
    tail -3 "$work/widening.log"
    remember PAIR small
    say "the large pair could not be made, or not within $LIMIT s, so the stages go on with the small one"
  fi
  # All servers use these kernels. They would compute wrong numbers, or end in their first forward.
  case $(verdict sglang) in
    *true*) remember SGLANG_FORCE_FUSED_OP_BACKEND ;;
    *false*) remember SGLANG_FORCE_FUSED_OP_BACKEND torch
       say "SGLang's own kernels are not right (kernels.json says why): all stages use torch's operators now" ;;
  esac
  case $(verdict prefills) in
    *false*) turn_off --disable-prefill-cuda-graph
       remember FLAGS "$FLAGS"
       say "SGLang's graphs of prefills are not right (kernels.json says why): no server captures any now" ;;
  esac
  case $right in
    0) say "the kernels agree with their references. Next: smoke" ;;
    3) remember ATTENTION triton
       say "FlashInfer failed (kernels.json says why) and Triton is right: all stages use Triton now. Next: smoke" ;;
    4) remember ATTENTION flashinfer
       say "AdaServe's own attention is not right (kernels.json says why): all stages use FlashInfer's. Next: smoke" ;;
    *) [ -f "$work/kernels.json" ] || tail -5 "$work/kernels.log"
       say "attention, noise, moves or beams has no kernel that is right (kernels.json), so AdaServe's figures may be" \
           "wrong. Stay with this stage where there is time. Run one:" \
           "python -m adaserve.bench.gpu_check.kernels --kernel triton --device $device"
       return 2 ;;
  esac
}

turn_off() { # turn_off FLAG: for every server
  [[ " $FLAGS " = *" $1 "* ]] || FLAGS+="${FLAGS:+ }$1"
}

narrow() { # 0: AdaServe is right with some parts turned off, and all stages go on without these
  [ "$device" = cuda ] || return 1
  local way attention=$ATTENTION flags=$FLAGS found
  say "AdaServe did not start, or its text is not SGLang's: the small pair with parts of it turned off"
  for way in no-prompts flashinfer no-graphs nothing; do
    ATTENTION=$attention FLAGS=$flags
    case $way in
      no-prompts) turn_off --disable-prefill-cuda-graph ;;
      flashinfer) ATTENTION=flashinfer ;;
      no-graphs) turn_off --disable-cuda-graph ;;
      nothing) ATTENTION=flashinfer
         turn_off --disable-cuda-graph
         turn_off --disable-overlap-schedule ;;
    esac
    found="$ATTENTION $FLAGS"
    [ "$found" != "$attention $flags" ] || continue
    small_is_exact
    case $? in
      0) say "right with --adaserve-attention $found, so all stages go on with these." \
             "Once the fault is mended, ATTENTION=auto FLAGS= before the command turns all parts on again"
         remember ATTENTION "$ATTENTION"
         remember FLAGS "${found#* }"
         [ "$found" = "$ATTENTION $FLAGS" ] # or the environment says otherwise
         return ;;
      124 | 137) say "the time was up"; break ;;
      *) say "not right, or not started, with --adaserve-attention $found" ;;
    esac
  done
  settle
  return 1
}

small_is_exact() { # with the parts that are in use
  gpu_check smoke small sglang:exactness adaserve:exactness
}

smoke() {
  small_is_exact
  local found=$?
  if [ $found = 0 ]; then
    say "the small pair is exact. Next: plain"
    return
  fi
  done_or_stop $found smoke
  narrow && return
  say "the small pair is not exact: spend the time here, not on speed"
  return 2
}

of_the_check() { # what a stage on the pair runs; 1 for the other stages
  case $1 in
    plain) echo sglang:exactness sglang:speed ;;
    adaserve) echo adaserve:exactness adaserve:speed adaserve:verification ;;
    standalone) for kind in sglang-own-topk1 sglang-own-topk2; do echo "$kind:speed" "$kind:exactness"; done ;;
    profile) echo adaserve:profile ;;
    mixed) echo adaserve:mixed-priced sglang-own-topk1:mixed sglang-own-topk2:mixed ;;
    *) return 1 ;;
  esac
}

advise() {
  case $1 in
    plain) say "next: adaserve. If this server ran out of memory: PAIR=small from here on" ;;
    adaserve) say "outside of the models above 8%: profile first. Otherwise: standalone" ;;
    standalone) say "slower than STANDALONE at some batch: profile at that batch. Next: profile" ;;
    profile) say "busy_share below 0.9: the device waits for the host; the trace shows where. Next: mixed" ;;
    mixed) say "all stages have run; the report is $work/$(folder "check-$PAIR")/gpu-check.json" ;;
  esac
}

is_exact() { # whether all of AdaServe's outputs were compared, and are SGLang's
  "$PYTHON" -c 'import json, sys; sys.exit(json.load(open(sys.argv[1]))["targets"][0]["met"] is not True)' \
    "$work/$(folder "check-$PAIR")/gpu-check.json" >/dev/null 2>&1
}

together() { # together STAGE...: stages on the pair, each server once
  local stage word words=() ours=() theirs=() status=0 found
  # shellcheck disable=SC2207
  for stage in "$@"; do words+=($(of_the_check "$stage")); done
  if [[ " ${words[*]} " = *" adaserve:exactness "* ]] && ! is_exact; then
    for word in "${words[@]}"; do
      case $word in sglang-own*) theirs+=("$word") ;; *) ours+=("$word") ;; esac
    done
    if [ -n "${TOGETHER:-}" ]; then # all servers start with the first check
      ours+=("${theirs[@]}")
      theirs=()
    fi
    gpu_check "check-$PAIR" "$PAIR" "${ours[@]}"
    found=$?
    done_or_stop $found "$@" || status=2
    case $found in 124 | 137) return 2 ;; esac # no part is to blame, and no time is left to look for one
    if ! is_exact; then
      # Where the large pair alone fails, memory may be short, and no part of AdaServe is to blame.
      if [ "$PAIR" = large ] && small_is_exact; then
        say "the small pair is exact with the same parts, so none is turned off. What the large one ran into" \
            "is in $work/$(folder check-large)"
      elif narrow; then
        together "$@"
        return
      fi
      status=2
    fi
    words=("${theirs[@]}")
  fi
  if [ ${#words[@]} -gt 0 ]; then
    gpu_check "check-$PAIR" "$PAIR" "${words[@]}"
    done_or_stop $? "$@" || status=2
  fi
  [ $status = 0 ] || return 2
  for stage in "$@"; do advise "$stage"; done
}

for stage in "${stages[@]:-help}"; do
  case $stage in
    assemble | facts | kernels | smoke | plain | adaserve | standalone | profile | mixed) ;;
    *) sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p;}' "$0"; [ "$stage" = help ]; exit ;;
  esac
done
if [ "$device" = cuda ] && [ -d site/adaserve ]; then own_code; fi
trap finish EXIT
if [ -n "${OUT:-}" ]; then
  keep_now_and_then >/dev/null 2>&1 </dev/null &
  saver=$!
fi
at=0 status=0
while [ $at -lt ${#stages[@]} ]; do
  stage=${stages[at]} group=()
  while [ $at -lt ${#stages[@]} ] && of_the_check "${stages[at]}" >/dev/null; do
    group+=("${stages[at]}")
    at=$((at + 1))
  done
  if [ ${#group[@]} -gt 0 ]; then
    together "${group[@]}" || status=2
  else
    at=$((at + 1))
    if ! "$stage"; then
      status=2
      case $stage in assemble | smoke) break ;; esac
    fi
  fi
done
exit $status
