# The server in a container: built from the clone, started, asked.
podman build -q -f "$CLONE/Containerfile.serve" -t trueline-newcomer "$CLONE"
python "$CLONE/bench/newcomer/ready.py" seal "$PWD/small.bundle"
chmod -R a+rX .
podman run --rm -d --name trueline-newcomer -p 127.0.0.1:18080:8080 -v "$PWD/small.bundle:/model:ro,Z" trueline-newcomer
trap 'podman rm -f trueline-newcomer' EXIT
for _ in $(seq 60); do curl -sf http://127.0.0.1:18080/v2/health/ready && exit 0; sleep 1; done
exit 1
