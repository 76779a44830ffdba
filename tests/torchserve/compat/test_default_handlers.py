"""The default handlers, with tiny models: images, boxes, pixels, texts, and files that are not unpickled."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from PIL import Image  # noqa: E402 - what needs torch comes after it was found

from trueline.torchserve.compat.ts.context import Context, RequestProcessor  # noqa: E402
from trueline.torchserve.compat.ts.metrics.metrics_store import MetricsStore  # noqa: E402
from trueline.torchserve.compat.ts.torch_handler.base_handler import BaseHandler  # noqa: E402
from trueline.torchserve.compat.ts.torch_handler.image_classifier import ImageClassifier  # noqa: E402
from trueline.torchserve.compat.ts.torch_handler.image_segmenter import ImageSegmenter  # noqa: E402
from trueline.torchserve.compat.ts.torch_handler.object_detector import ObjectDetector  # noqa: E402
from trueline.torchserve.compat.ts.torch_handler.text_classifier import TextClassifier  # noqa: E402
from trueline.torchserve.compat.ts.torch_handler.vision_handler import VisionHandler  # noqa: E402
from trueline.torchserve.compat.ts.utils.util import PredictionException  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(r"ignore:.*torch\.jit")]


class Means(torch.nn.Module):
    """The mean of each channel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=[2, 3])


def context(folder: Path, explain: bool = False, **model: Any) -> Context:
    made = Context("m", str(folder), {"model": model}, 1, None, "1", metrics=MetricsStore("m"))
    made.request_processor = [RequestProcessor({"explain": str(explain)})]
    return made


def scripted(folder: Path, module: torch.nn.Module, name: str = "model.pt") -> str:
    torch.jit.script(module).save(str(folder / name))
    return name


def png(color: tuple[int, int, int], size: tuple[int, int] = (300, 260)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


def test_an_image_is_classified_by_its_label_however_it_was_sent(tmp_path: Path) -> None:
    (tmp_path / "index_to_name.json").write_text(json.dumps({"0": "red", "1": "green", "2": "blue"}))
    handler = ImageClassifier()
    told = context(tmp_path, serializedFile=scripted(tmp_path, Means()))
    handler.initialize(told)
    image = png((255, 0, 0))
    ways = [{"data": bytearray(image)}, {"body": image}, {"data": base64.b64encode(image).decode()}]
    for answer in handler.handle(ways, told):
        assert list(answer) == ["red", "blue", "green"], "the likeliest first; a model of three classes has no five"
        assert sum(answer.values()) == pytest.approx(1.0)
        expected = [(1.0 - 0.485) / 0.229, -0.406 / 0.225, -0.456 / 0.224]
        assert list(answer.values()) == pytest.approx(torch.tensor(expected).softmax(0).tolist(), rel=1e-4)
    assert any(name == "HandlerTime" for name, *_ in told.metrics.drain())


def test_what_is_no_image_or_too_large_a_one_is_a_clients_fault(tmp_path: Path) -> None:
    handler = VisionHandler()
    handler.initialize(context(tmp_path, serializedFile=scripted(tmp_path, Means())))
    header = b"IHDR" + (50_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    bomb = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + header + zlib.crc32(header).to_bytes(4, "big")
    bomb += (64).to_bytes(4, "big") + b"IDAT"  # the decoder looks for it before it knows a PNG
    for content, status in [
        (b"no image", 400),
        (png((1, 2, 3))[:80], 400),
        (bomb, 413),
        ("?? no base64", 400),
        ([[1], [2, 3]], 400),
        (None, 400),
    ]:
        with pytest.raises(PredictionException) as refused:
            handler.preprocess([{"body": content}])
        assert refused.value.error_code == status, content
    handler.max_pixels = 100
    with pytest.raises(PredictionException, match="300 x 260 pixels, at most 100 go"):
        handler.preprocess([{"body": png((1, 2, 3))}])


def test_a_state_dict_is_loaded_and_a_pickle_of_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny_model.py").write_text(
        "import torch\n"
        "class Tiny(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 1, bias=False)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tiny_model", raising=False)
    torch.save({"layer.weight": torch.tensor([[2.0, 3.0]])}, tmp_path / "w.pt")
    handler = BaseHandler()
    told = context(tmp_path, modelFile="tiny_model.py", serializedFile="w.pt")
    handler.initialize(told)
    assert handler.handle([[1.0, 10.0], [0.0, 1.0]], told) == [[32.0], [3.0]]
    torch.save(Means(), tmp_path / "whole.pt")
    with pytest.raises(RuntimeError, match="holds more than weights and is not unpickled"):
        BaseHandler().initialize(context(tmp_path, modelFile="tiny_model.py", serializedFile="whole.pt"))
    with pytest.raises(RuntimeError, match=r"w\.pt is no TorchScript archive .* needs a modelFile"):
        BaseHandler().initialize(context(tmp_path, serializedFile="w.pt"))
    with pytest.raises(RuntimeError, match=r"w\.bin is not loaded here"):
        BaseHandler().initialize(context(tmp_path, serializedFile="w.bin"))


def test_objects_above_the_threshold_are_named_with_their_boxes(tmp_path: Path) -> None:
    (tmp_path / "index_to_name.json").write_text(json.dumps({"object_type_names": ["cat", "dog"]}))
    handler = ObjectDetector()

    class Finds(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    told = context(tmp_path, serializedFile=scripted(tmp_path, Finds()))
    handler.initialize(told)
    one = {
        "boxes": torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 3.0, 3.0]]),
        "labels": torch.tensor([1, 0]),
        "scores": torch.tensor([0.75, 0.25]),
    }
    handler.model = lambda images: ({}, [one for _ in images])  # as a scripted detector of torchvision answers
    images = [{"body": png((1, 2, 3))}, {"body": png((1, 2, 3), (90, 80))}]
    assert handler.handle(images, told) == [[{"dog": [0.0, 0.0, 2.0, 2.0], "score": 0.75}]] * 2


def test_every_pixel_has_a_class_and_its_probability(tmp_path: Path) -> None:
    handler = ImageSegmenter()
    values = torch.zeros(1, 2, 1, 3)
    values[0, 1, 0, 2] = 10.0
    rows = handler.postprocess({"out": values})
    assert [pixel[0] for pixel in rows[0][0]] == [0.0, 0.0, 1.0]
    assert rows[0][0][0][1] == pytest.approx(0.5)


class Bag(torch.nn.Module):
    """Counts how often number 3 is in the bag."""

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x == 3).sum().float(), torch.zeros([])])[None]


def test_a_text_is_cleaned_cut_into_ngrams_and_classified(tmp_path: Path) -> None:
    (tmp_path / "source_vocab.json").write_text(json.dumps({"<unk>": 0, "do": 1, "not": 2, "do not": 3, "cafe": 4}))
    handler = TextClassifier()
    told = context(tmp_path, serializedFile=scripted(tmp_path, Bag()))
    handler.initialize(told)
    assert handler.preprocess([{"body": bytearray(b"<b>Don't</b> Caf\xc3\xa9!")}]).tolist() == [1, 2, 4, 3, 0]
    answer = handler.handle([{"data": "I don't"}], told)
    assert answer[0]["0"] == pytest.approx(torch.tensor([1.0, 0.0]).softmax(0)[0].item())
    (tmp_path / "source_vocab.json").unlink()
    torch.save(Means(), tmp_path / "source_vocab.pt")
    with pytest.raises(RuntimeError, match=r"write it out as source_vocab\.json"):
        TextClassifier().initialize(told)


def test_an_explanation_without_captum_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    handler = ImageClassifier()
    handler.initialize(context(tmp_path, serializedFile=scripted(tmp_path, Means())))
    with pytest.raises(PredictionException, match="need the package captum"):
        handler.handle([{"body": png((1, 2, 3))}], context(tmp_path, explain=True))


@pytest.mark.jobs
def test_an_image_is_explained_by_what_each_of_its_values_adds_to_the_class(tmp_path: Path) -> None:
    pytest.importorskip("captum", reason="Captum is not installed: pip install 'trueline[explain]'")
    handler = ImageClassifier()
    told = context(tmp_path, serializedFile=scripted(tmp_path, Means()))
    handler.initialize(told)
    (scores,) = handler.inference(handler.preprocess([{"body": png((10, 200, 30))}]))
    asked = {"body": png((10, 200, 30)), "target": b"1"}
    found = torch.tensor(handler.handle([asked], context(tmp_path, explain=True))[0])
    assert found.shape[-3:] == (3, 224, 224)
    by_channel = found.reshape(3, -1).sum(dim=1)
    assert by_channel[1] == pytest.approx(float(scores[1]), rel=1e-3), "the mean of the channel is its values' sum"
    assert not by_channel[0]
    assert not by_channel[2]


class Words(torch.nn.Module):
    """Two scores of a bag, the second one bent."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(5, 3, mode="mean", sparse=sparse)
        self.embedding.weight.data = torch.linspace(-1, 1, 15).reshape(5, 3)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        bag = self.embedding(x, offsets)
        return torch.stack([bag.sum(dim=1), torch.tanh(bag).pow(2).sum(dim=1)], dim=1)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("script", [False, True])
def test_a_text_is_explained_by_what_each_of_its_words_adds_to_the_class(
    tmp_path: Path, script: bool, sparse: bool
) -> None:
    (tmp_path / "source_vocab.json").write_text(json.dumps({"<unk>": 0, "do": 1, "not": 2, "do not": 3, "cafe": 4}))
    handler = TextClassifier()
    handler.initialize(context(tmp_path, serializedFile=scripted(tmp_path, Words(sparse))))
    if not script:
        handler.model = Words(sparse).eval()
    before = handler.preprocess([{"data": "do not do"}])
    (scores,) = handler.inference(before)
    for target, asked in ((0, {"data": "do not do"}), (1, {"data": "do not do", "target": b"1"})):
        (told,) = handler.handle([asked], context(tmp_path, explain=True))
        assert told["words"] == ["do", "not", "do", "do not", "not do"]
        assert told["importances"][0] == told["importances"][2], "the same word twice adds the same"
        assert sum(told["importances"]) == pytest.approx(float(scores[target]), rel=1e-3), "an empty bag scores nothing"
    assert torch.equal(handler.inference(before)[0], scores), "an explanation changes no weight"
    for target in (b"2", b"-1", b"second"):
        with pytest.raises(PredictionException, match="the number of a class, 0 to 1") as refused:
            handler.handle([{"data": "do", "target": target}], context(tmp_path, explain=True))
        assert refused.value.error_code == 400


def test_a_text_is_not_explained_by_a_model_without_an_embedding(tmp_path: Path) -> None:
    (tmp_path / "source_vocab.json").write_text("{}")
    handler = TextClassifier()
    handler.initialize(context(tmp_path, serializedFile=scripted(tmp_path, Bag())))
    with pytest.raises(PredictionException, match=r"no nn\.Embedding to explain") as refused:
        handler.handle([{"data": "a"}], context(tmp_path, explain=True))
    assert refused.value.error_code == 501


def test_a_handler_that_explains_nothing_says_so(tmp_path: Path) -> None:
    handler = BaseHandler()
    with pytest.raises(PredictionException, match="explains nothing") as refused:
        handler.get_insights(None, None, 0)
    assert refused.value.error_code == 501


@pytest.mark.parametrize("text", ["<" * 1_000_000, "&" + "a" * 1_000_000, "<br" + " " * 1_000_000, "a<b\n" * 200_000])
def test_a_text_of_tags_without_end_is_cleaned_in_one_pass(text: str) -> None:
    """The pattern of TorchServe takes the square of the length: 13 s for 40 kB of "<"."""
    handler = TextClassifier()
    assert handler._remove_html_tags(text) == text
    assert handler._tokenize(text)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("<b>Bold</b> &amp; 1 < 2", "Bold  1 < 2"),
        ("a < b > c <d", "a  c <d"),
        ("1 > 0 <i\n>x</i>", "1 > 0 <i\n>x"),
        ("&#39;&#xff;&zzzz", "&zzzz"),
    ],
)
def test_tags_and_entities_go_as_in_torchserve(text: str, cleaned: str) -> None:
    assert TextClassifier()._remove_html_tags(text) == cleaned
    assert re.sub(r"<.*?>|&(?:[a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});", "", text) == cleaned
