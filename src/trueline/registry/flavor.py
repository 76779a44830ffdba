"""A bundle as an MLflow model: `mlflow.pyfunc.load_model(...)` runs its proven program in a Session.

MLflow reads the `MLmodel` that `describe_model` writes, and calls `_load_pyfunc` here. Nothing is unpickled and no code
comes from the model. Source: MLflow's "Custom flavors" and its `pyfunc` documentation, 3.17.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trueline.bundle.read import Bundle, open_bundle
from trueline.columns import answers
from trueline.columns.cells import to_json
from trueline.errors import DataError, RequestError, join_names
from trueline.registry import describe, store
from trueline.version import __version__

if TYPE_CHECKING:
    import pandas

    from trueline.columns.fitted import FittedColumns
    from trueline.runtime.session import Array, Session

_REQUIREMENTS = "requirements.txt"
_PYTHON_ENV = "python_env.yaml"


def describe_model(bundle: Bundle, folder: Path, *, model_id: str, run_id: str, where: str) -> None:
    """Writes the files of a logged model into `folder`, except the bundle, which belongs in `bundle/`."""
    from mlflow.models import Model

    model = Model(
        artifact_path=where, run_id=run_id, model_uuid=model_id, model_id=model_id,
        signature=describe.signature_of(bundle),
    )  # fmt: skip
    describe.save_example(model, bundle, folder)
    model.add_flavor(
        "python_function", loader_module=__name__, data=store.BUNDLE_FOLDER,
        python_version=platform.python_version(), env={"virtualenv": _PYTHON_ENV},
    )  # fmt: skip
    model.add_flavor(
        "trueline", trueline_version=__version__, bundle=store.BUNDLE_FOLDER, digest=bundle.digest,
        signature={
            way: [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]
            for way, specs in (("inputs", bundle.signature.inputs), ("outputs", bundle.signature.outputs))
        },
    )  # fmt: skip
    model.save(str(folder / "MLmodel"))
    (folder / _REQUIREMENTS).write_text("".join(f"{line}\n" for line in describe.requirements_of(bundle)))
    (folder / _PYTHON_ENV).write_text(
        f"python: {platform.python_version()}\nbuild_dependencies:\n- pip\ndependencies:\n- -r {_REQUIREMENTS}\n"
    )


class BundleModel:
    """The model that MLflow wraps: `predict` takes one array, or a dict of them by input name. MLflow makes one of
    a DataFrame with a column for each input, of flat arrays or numbers. With `columns` it takes a DataFrame of records.
    """

    def __init__(self, session: Session, columns: FittedColumns | None = None) -> None:
        self._session, self._columns = session, columns

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Outputs by name, or the array itself if there is one output; for records a DataFrame with `class` and
        `probabilities`, or `value`, as the server answers. Raises RequestError as the Session does.

        MLflow's clients send numbers as 64-bit: they are cast to the signature's width, never from float to int.
        """
        if params:
            raise RequestError(f"the model takes no parameters, got: {join_names(params)}")
        fitted = self._columns
        if fitted is not None and hasattr(model_input, "to_dict"):
            import pandas

            outputs = self._session.run(_encode(fitted, model_input))
            found = answers.records_of(fitted, outputs)
            return pandas.DataFrame(found) if answers.find_output(fitted, outputs) else _only(outputs)
        return _only(self._session.run(self._cast(model_input)))

    def _cast(self, given: Any) -> dict[str, Array]:
        specs = self._session.signature.inputs
        if not isinstance(given, Mapping):
            if len(specs) != 1:
                names = join_names(spec.name for spec in specs)
                raise RequestError(f"the model takes {len(specs)} inputs ({names}); pass a dict of arrays")
            given = {specs[0].name: given}
        dtypes = {spec.name: spec.dtype for spec in specs}
        inputs = {}
        for name, value in given.items():
            array = np.asarray(value)
            dtype = dtypes.get(name, array.dtype)
            inputs[str(name)] = array.astype(dtype) if np.can_cast(array.dtype, dtype, "same_kind") else array
        return inputs


def _only(outputs: dict[str, Array]) -> Any:
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _encode(fitted: FittedColumns, table: pandas.DataFrame) -> dict[str, Array]:
    """The inputs of a table of records, whose cells are as a request has them. Raises RequestError."""
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    try:
        return fitted.encode_rows([{str(name): to_json(cell) for name, cell in row.items()} for row in rows])
    except DataError as error:
        raise RequestError(error.message, hint=error.hint) from error


def _load_pyfunc(path: str) -> BundleModel:
    from trueline.runtime.open import open_program

    bundle = open_bundle(Path(path))
    return BundleModel(open_program(bundle), bundle.columns())
