# A CSV with empty cells: train with two workers of which one is killed, capture, serve, ask.
sed -n '/title="make_customers.py"/,/^```$/p' "$CLONE/docs/start/quickstart.md" | sed '1d;$d' >make_customers.py
mkdir customers
sed -n '/title="customers\/recipe.py"/,/^```$/p' "$CLONE/docs/start/quickstart.md" | sed '1d;$d' >customers/recipe.py
python make_customers.py
trueline train customers/recipe.py --workers 2 --kill 100
trueline capture customers/recipe.py runs/customers-1
python - <<'CHECK'
from trueline.serve import start
import json, urllib.request
with start("customers.bundle") as server:
    def ask(record):
        body = json.dumps(record).encode()
        return json.load(urllib.request.urlopen(f"{server.url}/predictions/customers", body))
    stays, leaves = ask([43, 2900, 25]), ask([43, 2900, 1])
assert stays[0] > stays[1] and leaves[1] > leaves[0], (stays, leaves)
CHECK
