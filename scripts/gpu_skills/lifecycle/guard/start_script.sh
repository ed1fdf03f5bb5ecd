# Goes on after the fuse where `args` took the place of the image's own command: its start script, or an SSH server.
# As in fuse.sh there is no single quote in it.

[ -x /start.sh ] && exec /start.sh

d=${HOME:-/root}/.ssh s=/usr/sbin/sshd
mkdir -p $d /run/sshd
echo "$PUBLIC_KEY" >>$d/authorized_keys
chmod -R go= $d
while :; do
  [ -x $s ] || { apt-get update && apt-get install -y openssh-server; }
  ssh-keygen -A
  # Sessions get the paths of the image, which sshd would replace. With a server already there this one ends by itself.
  $s -o "SetEnv=PATH=$PATH LD_LIBRARY_PATH=$LD_LIBRARY_PATH"
  sleep 60
done
