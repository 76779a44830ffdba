#!/bin/sh
# A real Kubernetes for the tests, into FOLDER/bin: apiserver, controller-manager, scheduler and kubelet, built from
# Debian's source package by Debian's Go, with etcd, containerd, runc and the network plugins of the same release.
# Nothing is installed on the machine and root is not needed. Without the folder's cache it takes some ten minutes of
# two cores and 3 GB of disk; what is there is not built again, and a build that was interrupted continues.
#
#   sh tests/worlds/kubernetes/build.sh FOLDER
#
# Debian 12 is the last release whose source package has the whole of Kubernetes. It is built as that release needs it:
# in GOPATH mode, and with a reflect2 that works with Go 1.19 (the vendored one ends the API server with
# "fatal error: fault" at the first custom resource).
set -eu

release=bookworm
programs="kube-apiserver kube-controller-manager kube-scheduler kubelet"
packages="golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
  etcd-server containerd runc libseccomp2 containernetworking-plugins"
version=1

folder=${1:?"usage: build.sh FOLDER"}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
ready="$folder/bin/ready-$version"
if [ -e "$ready" ]; then
  echo "Kubernetes is in $folder/bin"
  exit 0
fi
exec 9>"$folder/lock"
flock 9
if [ -e "$ready" ]; then exit 0; fi

say() { echo "$(date +%T) $*"; }
lack() { echo "no Kubernetes: $*" >&2; exit 1; }

# apt with lists of its own, so that the machine's stay as they are. The mirror is the machine's.
mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
  sed -n 's/^Debian \(.*\) main$/\1/p' | grep -v security | head -1)
[ -n "$mirror" ] || lack "apt knows no mirror of Debian here (apt-get update?)"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e "$keys" ] || lack "$keys is not there: apt-get install debian-archive-keyring"
apt="$folder/apt"
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/debs" "$folder/bin"
printf '%s [signed-by=%s] %s %s main\n' deb "$keys" "$mirror" $release deb-src "$keys" "$mirror" $release \
  > "$apt/sources.list"
# shellcheck disable=SC2086
call_apt() {
  apt-get -qq -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache" -o Debug::NoLocking=1 -o APT::Sandbox::User="" "$@"
}
say "downloads packages and sources of Debian ($release)"
call_apt update
(cd "$apt/debs" && call_apt download $packages && call_apt source --download-only kubernetes)

root="$folder/root"
rm -rf "$root"
mkdir -p "$root"
for package in "$apt"/debs/*.deb; do dpkg-deb -x "$package" "$root"; done
go="$root/usr/lib/go-1.19"

sources="$folder/go/src/k8s.io/kubernetes"
if [ ! -e "$sources/.unpacked-$version" ]; then
  say "unpacks the sources"
  rm -rf "$folder/go"
  mkdir -p "$sources"
  tar --strip-components=1 -xzf "$apt"/debs/kubernetes_*.orig.tar.gz -C "$sources"
  rm -rf "$sources/vendor/github.com/modern-go/reflect2"
  cp -rL "$root/usr/share/gocode/src/github.com/modern-go/reflect2" "$sources/vendor/github.com/modern-go/reflect2"
  touch "$sources/.unpacked-$version"
fi

export GOROOT="$go" GOPATH="$folder/go" GOCACHE="$folder/go-build" GO111MODULE=off CGO_ENABLED=0 GOFLAGS="" PATH="$go/bin:$PATH"
cd "$sources"

if [ ! -s pkg/generated/openapi/zz_generated.openapi.go ]; then
  say "generates the API's description"
  go build -o "$folder/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  inputs=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg staging/src |
    grep -v -e zz_generated -e code-generator -e sample- | xargs -n1 dirname | sort -u |
    sed -e 's#^staging/src/#vendor/#' -e 's#^#k8s.io/kubernetes/#' | paste -sd,)
  "$folder/openapi-gen" --logtostderr --go-header-file hack/boilerplate/boilerplate.generatego.txt \
    --output-base "$GOPATH/src" --output-package k8s.io/kubernetes/pkg/generated/openapi \
    --output-file-base zz_generated.openapi -r /dev/null --input-dirs "$inputs"
fi

for program in $programs; do
  say "builds $program"
  go build -trimpath -ldflags '-s -w' -o "$folder/bin/$program" "./cmd/$program"
done

# What holds a pod's network while its container runs, and reaps the processes that are left.
cat > "$folder/pause.go" <<'GO'
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ends, children := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(ends, syscall.SIGTERM, syscall.SIGINT)
	signal.Notify(children, syscall.SIGCHLD)
	for {
		select {
		case <-ends:
			return
		case <-children:
			for {
				if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
					break
				}
			}
		}
	}
}
GO
go build -trimpath -ldflags '-s -w' -o "$folder/bin/pause" "$folder/pause.go"

cp "$root"/usr/bin/etcd "$root"/usr/bin/containerd "$root"/usr/bin/containerd-shim-runc-v2 "$root"/usr/bin/ctr \
  "$root"/usr/sbin/runc "$folder/bin/"
rm -rf "$folder/bin/cni"
cp -r "$root/usr/lib/cni" "$folder/bin/cni"
mkdir -p "$folder/bin/lib"
cp -L "$root"/usr/lib/*/libseccomp.so.2 "$folder/bin/lib/"
rm -rf "$root" "$folder/go" "$folder/go-build" "$apt" "$folder/openapi-gen" "$folder/pause.go"
touch "$ready"
say "Kubernetes is in $folder/bin"
