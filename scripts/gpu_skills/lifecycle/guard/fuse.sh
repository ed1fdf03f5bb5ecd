# The fuse of a rented machine: ends its billing at the deadline, with nothing but the machine's own key.
#
# fuse.py puts values above this text and takes comments and indentation out; it runs at every start of the container.
#   I intent           E deadline, epoch seconds    L seconds of running until then   F folder   W stop or destroy
#   N name of the variable that holds the key       M U B method, address, body: ends the billing
#   PM PU PB           the same, of a request that changes nothing while the machine runs
#   S                  body for PM PU that stops, where a key may perhaps stop and not destroy
#
# Files of the folder begin with the intent, so that those of another machine on the same volume count for nothing:
#   deadline EPOCH|never SECONDS   alive EPOCH USED BOOT   fire SESSION BOOT   grace EPOCH DEADLINE   pid PID START
# There is no single quote in it, because it travels inside a pair of them.

say() { printf "gpu-fuse: %s\n" "$*"; }
num() { [[ $1 =~ ^(0|[1-9][0-9]{0,10})$ ]]; }

# get NAME: its words in x y z; false when it is not there or not ours.
get() {
  i= x= y= z=
  [[ -f $F/$1 ]] && read -rn200 i x y z 2>/dev/null <"$F/$1"
  [[ $i = "$I" ]]
}

put() { printf "%s %s\n" $I "$2" >"$F/.$1" && mv -f "$F/.$1" "$F/$1"; } 2>/dev/null

# The key goes through a pipe or the environment it came in: never in an argument, never on a disk.
by_curl() {
  printf "header = \"Authorization: Bearer %s\"\n" "${!N}" |
    curl -qsSm 20 -A gpu-fuse -K - -X $1 -H Content-Type:application/json -d "$3" -w "\n%{http_code}" $2
}

by_python3() {
  A=$1 U=$2 B=$3 python3 -Ic "
import os,urllib.request as u,urllib.error as x
e=os.environ
h={\"Authorization\":\"Bearer \"+e[\"$N\"],\"User-Agent\":\"gpu-fuse\",\"Content-Type\":\"application/json\"}
try:r=u.urlopen(u.Request(e[\"U\"],e[\"B\"].encode(),h,method=e[\"A\"]),timeout=20)
except x.HTTPError as f:r=f
print(r.read(999),r.code,sep=chr(10))"
}

# It reads its settings from files only: from one in memory, that has no name any more.
by_wget() {
  h=/dev/shm/$I
  printf "header = Authorization: Bearer %s\n" "${!N}" >$h && exec 3<$h
  rm -f $h
  r=$(wget --config=/dev/fd/3 -qSO- -t1 -T20 -U gpu-fuse --content-on-error --method=$1 \
    --header=Content-Type:application/json --body-data="$3" $2 2>&1)
  [[ $r =~ HTTP/[.0-9]+\ ([0-9]+) ]]
  printf "%s\n%s" "$r" ${BASH_REMATCH[1]}
}

# ask METHOD URL BODY: C is the code of the answer, 000 without one; K what it says about the key.
ask() {
  ok=
  for c in curl python3 wget; do
    C=000
    type $c &>/dev/null || continue
    r=$(by_$c "$@" 2>&1)
    C=${r##*$n}
    [[ $C =~ ^[1-5]..$ ]] && break
    say "$c: $C"
    C=000
  done
  case $C in
    2*) [[ $r =~ \"success\":\ *false ]] || K=proven ok=1 ;;
    409) K=proven ;;
    40[13]) [[ $r = *\<* ]] || K=denied ;; # a page is of the network in between
    404) [[ $r = *auth_error* ]] && K=denied ;;
  esac
  [ $ok ]
}

# T: the wall clock. u: seconds this machine has run; whoever moves the wall clock does not move them.
tick() {
  printf -v T "%(%s)T" -1
  h=
  read -r h 2>/dev/null </proc/uptime
  h=${h%%.*}
  num "$h" || h=$((X + 2))
  ((X < 0 || (u += h < X ? 2 : h - X)))
  X=$h
}

aim() {
  D=$E Q=$L
  get deadline && { [ "$x" = never ] || num "$x"; } && num "$y" && D=$x Q=$y
}

# When the living process with this number began: with the number it names one process.
born() {
  read -r s 2>/dev/null </proc/$1/stat && set -- ${s##*) } && [[ $1 != [ZX] ]] && echo ${20}
}

fuse() {
  m=$BASHPID K=unknown X=-1 u=0 b= G=0 g=0 v=0 q=0 p=0 t=0 w=2 Z=0 was=
  printf -v n "\n"
  trap "" HUP INT TERM PIPE
  umask 077
  cd /
  mkdir -p "$F"
  get pid && num "$x" && [ "$(born $x)" = "${y:-0}" ] && return
  put pid "$m $(born $m)"
  bash "$F/boot" &>/dev/null & # services that are to be there again
  tick
  aim
  a=$T
  if get alive; then
    num "$y" && u=$y
    num "$x" || x=0
    if ((T - x > 180)); then # stopped, and started by somebody, who has this long to write a new deadline
      G=$((T + 600)) g=$((u + 600))
      # Once per deadline and hour: a container that crashes and is started again with long pauses looks like it.
      if get grace && num "$x" && [ "$y" = $D ] && ((T < x + 3600)); then G=$x; else put grace "$G $D"; fi
    elif [[ $z =~ ^[0-9a-f]+$ ]]; then b=$z; fi
  fi
  if [ -z $b ]; then
    rm -f "$F/fire"
    printf -v b %x%x%x $T $RANDOM $RANDOM
  fi
  say "armed: $W $D"
  while :; do
    tick
    aim
    on=
    if [ $D != never ] && ((T >= D || u >= Q)) && ((T >= G || u >= g)); then on=deadline; fi
    if get fire && [ "$y" = $b ]; then on=session; fi
    if [ -z $on ]; then
      t=0 w=2 Z=0
      if [ $K = unknown ] && ((q < 6 && u >= p)); then
        ask $PM $PU "$PB"
        p=$((u + (4 << q++)))
        say "probe: $C $K"
      fi
    elif ((u >= t)); then
      # 0: the next start is by somebody, however soon it comes. Said before the end, which may be quicker than its answer.
      Z=0 v=0
      put alive "0 $u $b"
      { ask $M $U "$B" || { [ $S ] && ask $PM $PU "$S"; }; } && Z=1 && rm -f "$F/grace"
      say "$on: $W: $C"
      ((w = w < 60 ? w * 2 : 60, t = u + w))
    fi
    if ((u >= v)); then
      put alive "$((Z ? 0 : T)) $u $b"
      v=$((u + 20))
    fi
    if [ $K$D != "$was" ] || [ ! -f "$F/receipt.json" ]; then
      echo "{\"intent\":\"$I\",\"deadline\":\"$D\",\"armed_at\":$a,\"key\":\"$K\",\"on_expiry\":\"$W\",\"boot\":\"$b\"}" >"$F/.r" &&
        mv -f "$F/.r" "$F/receipt.json" && was=$K$D
    fi 2>/dev/null
    sleep 2
  done
}

# A process group of its own: whoever ends the group of the start command leaves it alone.
set -m
fuse </dev/null &
set +m
