# Texts of different lengths: the template, the whole line, every held-out answer compared.
trueline init reviews --template text
trueline ship reviews/recipe.py --workers 2 --json >shipped.json
python - <<'CHECK'
import json
shipped = json.loads(open("shipped.json").read().splitlines()[-1])
assert shipped["evaluation"]["metrics"]["accuracy"] > 0.8, shipped["evaluation"]
assert shipped["served"]["decisions_changed"] == 0 and shipped["served"]["records"] > 50, shipped["served"]
CHECK
