"""Runs the code cells of a notebook, one after another, in one namespace: `jupyter nbconvert --execute` where there is no Jupyter.

    python run_notebook.py NOTEBOOK
"""

import json
import sys
from pathlib import Path

notebook = json.loads(Path(sys.argv[1]).read_text())
cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
if any(cell["outputs"] or cell["execution_count"] for cell in cells):
    raise SystemExit(f"{sys.argv[1]} has outputs: clear them before it is committed")
namespace = {"__name__": "__main__"}
for number, cell in enumerate(cells, 1):
    print(f"--- cell {number}", flush=True)
    exec(compile("".join(cell["source"]), f"{sys.argv[1]}, cell {number}", "exec"), namespace)
print(f"figure: cells of the notebook run: {len(cells)}")
