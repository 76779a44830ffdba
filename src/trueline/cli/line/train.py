"""`trueline train`."""

from typing import Any

from trueline.cli.jobs import _launch
from trueline.cli.options import Output, checkpoint_path, recipe_argument, verb

_EXAMPLES = """
trueline train digits/recipe.py --workers 3
    three worker processes share each step; prints the last checkpoint's path

trueline train digits/recipe.py --workers 2:8 --kill 20:1 --kill 40
    kills worker 1 at step 20 and worker 0 at step 40; the loss curve does not change

trueline train digits/recipe.py --monitor -accuracy --patience 3 --detach
    in the background; evaluates after each epoch and stops after three without a better accuracy

trueline train flowers/recipe.py --weights resnet18.safetensors --new-layers fc
    starts from weights of a file, all but the layer fc, which has another number of classes here

trueline train digits/recipe.py --qat --weights runs/digits-1/checkpoints/step-00000276
    trains on, with weights and inputs rounded as int8 kernels round them; then capture, and compress --quantize static

trueline train digits/recipe.py --job runs/digits-1 --resume
    continues a job that lost every process, from its newest checkpoint
"""


@verb(
    "train", examples=_EXAMPLES, shows_progress=True, first=("workers", "epochs", "global_batch", "job_dir", "resume")
)
@recipe_argument
@_launch.training_options()
@_launch.job_option
@_launch.resume_option
@_launch.how_options
@_launch.qat_option
@_launch.kill_option
def command(recipe: str, kills: tuple[str, ...], qat: bool, **given: Any) -> Output:
    """Train the recipe's model with elastic worker processes.

    Each optimizer step takes --batch records, however many workers share it: workers may join, leave and be
    killed, and the sequence of steps stays the same. Every record is applied exactly once in each epoch; the job counts
    them and prints the result at the end. RECIPE is a file, a folder with a recipe.py, or package.module:object. The
    recipe sets what these options leave out. Exit code 3: trained, but without records that failed on every worker.
    """
    from trueline.train.api import prepare

    faults = [_launch.parse_fault(kill) for kill in kills]
    if given["weights"]:
        given["weights"] = str(checkpoint_path(given["weights"]))
    if qat:
        recipe = _launch.derive_qat(recipe, given["weights"], resume=given["resume"])
    return _launch.launch(lambda **job: prepare(recipe, faults=faults, **job), given)
