# The server in a container: built from the clone, started without privileges, asked with its token.
# Exit status 77: containers cannot be built here; the last line says why.
command -v podman >/dev/null || { echo "podman is not installed"; exit 77; }
name="trueline-newcomer-$$"
base=docker.io/library/python:3.12-slim
if ! podman pull -q "$base"; then # no image registry is reachable: a base from Debian's packages
    base=localhost/debian-python
    command -v mmdebstrap >/dev/null || { echo "no image registry is reachable, and mmdebstrap is not installed"; exit 77; }
    podman image exists "$base" || { # debootstrap would wait for the disk after each package
        mmdebstrap -q --variant=minbase --include=python3,python3-venv,ca-certificates bookworm base.tar
        podman import -q base.tar "$base"
        rm base.tar
    }
fi
# A host that is a container itself forbids crun its limits and cgroups; runc asks for less.
build=() run=()
if ! podman run --rm "$base" true; then
    command -v runc >/dev/null || { echo "crun cannot start containers here, and runc is not installed"; exit 77; }
    build=(--isolation chroot --network host -v /etc/ssl/certs:/etc/ssl/certs:ro)
    run=(--ulimit nofile=1024:1024 --ulimit nproc=1024:1024)
    podman() { case "$1" in run) shift; command podman --runtime runc run "$@" ;; *) command podman "$@" ;; esac; }
    podman run --rm "${run[@]}" "$base" true || { echo "neither crun nor runc can start containers here"; exit 77; }
fi
podman build -q "${build[@]}" --build-arg "BASE=$base" -f "$CLONE/Containerfile.serve" -t trueline-newcomer "$CLONE"
python "$CLONE/bench/newcomer/ready.py" seal "$PWD/small.bundle"
chmod -R a+rX .
podman run "${run[@]}" --rm -d --name "$name" -p 127.0.0.1::8080 -v "$PWD/small.bundle:/model:ro,Z" trueline-newcomer
trap 'podman stop -t 5 "$name" >/dev/null' EXIT
url="http://$(podman port "$name" 8080)"
curl -sf --retry 60 --retry-delay 1 --retry-all-errors "$url/v2/health/ready"
token=$(podman exec "$name" python3 -c "import json; print(json.load(open('/state/keys.json'))['inference']['key'])")
URL=$url TOKEN=$token python - <<'CHECK'
import json, os, urllib.request
url, headers = os.environ["URL"], {"authorization": f"Bearer {os.environ['TOKEN']}"}
(model,) = json.load(urllib.request.urlopen(urllib.request.Request(f"{url}/v2/repository/index", b"{}", headers)))
meta = json.load(urllib.request.urlopen(urllib.request.Request(f"{url}/v2/models/{model['name']}", headers=headers)))
width = meta["inputs"][0]["shape"][1]
body = json.dumps([[0.5] * width] * 2).encode()
asked = urllib.request.Request(f"{url}/predictions/{model['name']}", body, {**headers, "content-type": "application/json"})
first, second = json.load(urllib.request.urlopen(asked))
assert first == second and len(first) == meta["outputs"][0]["shape"][1], (first, second)
CHECK
