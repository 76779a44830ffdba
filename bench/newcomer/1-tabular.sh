# A CSV of one's own, with empty cells: two commands to a server, of which the second kills a worker; then an answer.
sed -n '/title="make_customers.py"/,/^```$/p' "$CLONE/docs/start/quickstart.md" | sed '1d;$d' >make_customers.py
python make_customers.py
trueline init customers customers.csv --label left
trueline ship customers/recipe.py --workers 2
python - <<'CHECK'
from trueline.serve import start
import json, urllib.request
with start("runs/customers-1/customers.bundle") as server:
    def ask(**record):
        body = json.dumps(record).encode()
        return json.load(urllib.request.urlopen(f"{server.url}/predictions/customers", body))["class"]
    answers = [ask(age=43, income=income, visits=visits) for income in (2900, None) for visits in (25, 1)]
assert answers == ["0", "1", "0", "1"], answers
CHECK
