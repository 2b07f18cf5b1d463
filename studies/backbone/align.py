"""A pair of towers from one of images and one of texts that never met: the text side is fitted to the frozen images.

python studies/backbone/align.py --images DINOV2 --text BGE --out FOLDER
python studies/backbone/align.py --tiny --out FOLDER      random towers and made-up images, in seconds

The folder is a plain transformers VisionTextDualEncoderModel with its tokenizer, and alignment.json beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    CLIPVisionModelWithProjection,
    VisionTextDualEncoderModel,
)

from partita import data
from partita.core.rng import Key
from partita.data import Task
from partita.data.task import Table
from partita.evaluation import score
from partita.models import CACHED_STATES
from partita.models.functional import without_logs
from partita.models.prompts.clip import clip

TEMPLATES = ("a photo of a {}.", "{}", "a picture of the {}.", "a small photo of one {}.", "this is a {}.")
STRAIGHT = 0.05  # a state's share that enters the pooler's tanh, small enough for it to be nearly straight
SHARD = "45MB"  # the largest file of weights
STATISTICS = {  # of the pixels that each tower was trained on
    "dinov2": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
# By class to be tested on: classes that are kinds of it, or another word for it, though no word of theirs says so.
KINDS = {
    "aquarium_fish": "goldfish",
    "airplane": "helicopter",
    "automobile": "sports car, convertible, limousine, beach wagon, car side",
    "beetle": "ladybug",
    "bike": "bicycle, motorcycle, motorbikes",
    "bird": "albatross, goose, king penguin, black stork, crane, ibis, flamingo, flamingo head, pigeon, rooster, emu",
    "bridge": "viaduct",
    "butterfly": "monarch",
    "calculator": "abacus",
    "cat": "tabby, garfield",
    "cattle": "ox, bison",
    "clock": "watch, stopwatch, hourglass",
    "crocodile": "american alligator",
    "cup": "espresso",
    "deer": "gazelle, gerenuk",
    "dog": "german shepherd, labrador retriever, golden retriever, yorkshire terrier, chihuahua, standard poodle, "
    "dalmatian, snoopy",
    "frog": "bullfrog, tailed frog",
    "hamster": "guinea pig",
    "house": "barn, cliff dwelling, thatch",
    "lamp": "lampshade",
    "man": "faces",
    "monitor": "television",
    "motorcycle": "motorbikes",
    "mountain": "alp, cliff",
    "mug": "cup, espresso",
    "oak_tree": "joshua tree, bonsai",
    "person": "faces, man, woman, boy, girl, baby",
    "rocket": "projectile",
    "rose": "lotus, water lilly",
    "sea": "seashore",
    "ship": "ferry, ketch, schooner, gondola, lifeboat",
    "snake": "boa constrictor",
    "spider": "tarantula, black widow",
    "streetcar": "trolleybus",
    "sweet_pepper": "bell pepper",
    "table": "desk",
    "telephone": "pay-phone, cellphone, ipod",
    "train": "freight car",
    "truck": "moving van, police van",
    "turtle": "hawksbill",
}


@dataclass(frozen=True)
class Settings:
    images: str
    text: str
    learn: tuple[str, ...]  # folders of images to learn from
    test: tuple[str, ...]  # folders of images to test on
    size: int
    per_class: int
    most: int  # images of a test part
    met: bool  # learn from other folders' images of the classes to be tested on, too
    seed: int
    device: str
    public: int = 0  # images of each class to be tested on that the fit may see, and that no client holds
    keep: tuple[int, int] | None = None  # how many train and test images are left for clients; None for all


def align(settings: Settings, out: Path) -> dict[str, Any]:
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    pair, tokenizer, statistics = towers(settings)
    pair.to(settings.device).eval().requires_grad_(False)
    mean, std = statistics

    def read(path: str) -> Task:
        # Few images of many are read, so they are decoded when they are.
        return data.load("images", Key(settings.seed), path=path, size=settings.size, mean=mean, std=std, memory=0)

    tests = {Path(path).name: read(path) for path in settings.test}
    tested = [] if settings.met else [name for task in tests.values() for name in task.classes]
    images, labels, names = learnt(pair, [(path, read(path)) for path in settings.learn], tested, settings, out.parent)
    # Before the projection changes.
    seen = {path: test_features(pair, path, tests[Path(path).name], settings, out.parent) for path in settings.test}
    cut, public, own_classes = {}, images[:0], labels[:0]
    if settings.public:
        for path in settings.test:
            rows = public_rows(tests[Path(path).name], settings.public, Key(settings.seed))
            rest = out.parent / "rest" / f"{Path(path).name}-{out.name}"
            cut[Path(path).name] = write_rest(Path(path), rows, rest, settings.keep)
        public, own_classes, tested_names = shown(pair, tests, settings, out.parent)
        own_classes = own_classes + len(names)
        names = [*names, *tested_names]
    learned = len(labels)
    images, labels = torch.cat([images, public]), torch.cat([labels, own_classes])
    spread = telling(images, labels)
    pair.visual_projection.weight.data = spread @ pair.visual_projection.weight.data
    images = functional.normalize(images @ spread.T)
    texts = torch.stack([pooled(pair, tokenizer, [t.format(name) for name in names]) for t in TEMPLATES])
    known = int(labels[:learned].max()) + 1
    ridge, kept_out = choose(texts[:, :known], images[:learned], labels[:learned], settings.seed)
    share, own_score = 1.0, {}
    if settings.public:
        ridge, share, own_score = choose_public(texts, images, labels, known)
    weight = fit(texts, prototypes(images, labels, len(names)), ridge, weights(len(names), known, share, labels))
    pair.text_projection.weight.data = weight
    pair.logit_scale.data = temperature(texts[0] @ weight.T, images, labels)
    with without_logs():
        pair.cpu().half().save_pretrained(out, max_shard_size=SHARD)
    tokenizer.save_pretrained(out)
    result = {
        "images": Path(settings.images).name,
        "text": Path(settings.text).name,
        "size": settings.size,
        "met": settings.met,
        "classes": len(names),
        "learnt_from": len(labels),
        "ridge": ridge,
        "scale": round(float(pair.logit_scale.exp()), 2),
        "kept_out": kept_out,
        "public": {"a_class": settings.public, "images": len(public), "share": share, **own_score, "cut": cut},
        "zero_shot": {
            Path(path).name: zero_shot(out, tests[Path(path).name], found @ spread.T, settings)
            for path, found in seen.items()
        },
        "seconds": round(time.perf_counter() - start, 1),
        "names": names,
    }
    (out / "alignment.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def towers(settings: Settings) -> tuple[Any, Any, tuple[tuple[float, ...], tuple[float, ...]]]:
    """The two put side by side; images keep their own features, or CLIP's projection of them."""
    with without_logs():
        text, tokenizer = AutoModel.from_pretrained(settings.text), AutoTokenizer.from_pretrained(settings.text)
        kind = str(AutoConfig.from_pretrained(settings.images).model_type)
        if kind.startswith("clip"):
            whole = CLIPVisionModelWithProjection.from_pretrained(settings.images)
            sight, projection = whole.vision_model, whole.visual_projection.weight.detach()
        else:
            sight = AutoModel.from_pretrained(settings.images)
            projection = torch.eye(sight.config.hidden_size)
        pair = VisionTextDualEncoderModel(vision_model=sight, text_model=text)
    if kind.startswith("clip"):
        place(pair.vision_model, settings.size)  # not before: what transformers did not load itself, it draws again
    pair.config.projection_dim = pair.projection_dim = len(projection)
    pair.visual_projection = nn.Linear(projection.shape[1], len(projection), bias=False)
    pair.visual_projection.weight.data = projection.clone()
    pair.text_projection = nn.Linear(text.config.hidden_size, len(projection), bias=False)
    # A sentence is its first token, which transformers' pair takes through the pooler.
    text.pooler.dense.weight.data = STRAIGHT * torch.eye(text.config.hidden_size)
    text.pooler.dense.bias.data = torch.zeros(text.config.hidden_size)
    return pair, tokenizer, STATISTICS["clip" if kind.startswith("clip") else "dinov2"]


def place(sight: Any, size: int) -> None:
    """Have a CLIP's tower take images of another size: the places of its patches are those of a coarser grid."""
    inside, table = sight.embeddings, sight.embeddings.position_embedding.weight.data
    side = round((len(table) - 1) ** 0.5)
    grid = table[1:].T.reshape(1, -1, side, side)
    wanted = size // inside.patch_size
    grid = functional.interpolate(grid, (wanted, wanted), mode="bicubic")
    inside.position_embedding = nn.Embedding.from_pretrained(torch.cat([table[:1], grid[0].flatten(1).T]))
    inside.position_ids = torch.arange(1 + wanted**2).expand(1, -1)
    inside.num_patches, inside.num_positions = wanted**2, 1 + wanted**2
    inside.image_size = sight.config.image_size = size


def words_of(name: str) -> set[str]:
    """In the singular, as far as an s at the end tells."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z]+", name.lower())}


def readable(name: str) -> str:
    return name.replace("_", " ").lower()


def learnable(name: str, tested: Sequence[str]) -> bool:
    """Whether a class is none of those to be tested on, nor a kind of one, nor named after one."""
    kinds = {kind.strip() for each in tested for kind in KINDS.get(each, "").split(",")}
    taboo = {word for each in tested for word in words_of(each)}
    return words_of(name).isdisjoint(taboo) and readable(name) not in kinds


def learnt(
    pair: Any, tasks: Sequence[tuple[str, Task]], tested: Sequence[str], settings: Settings, kept: Path
) -> tuple[Tensor, Tensor, list[str]]:
    """(image, feature), the class of each image, and the classes."""
    rows, classes = [], []
    for path, task in tasks:
        every = range(len(task.classes))
        which = torch.cat([(task.train.targets == each).nonzero().flatten()[: settings.per_class] for each in every])
        found = features(pair, path, task, which, settings, kept)
        names = [task.classes[each] for each in task.train.targets[which].tolist()]
        wanted = [learnable(name, tested) for name in names]
        rows.append(found[torch.tensor(wanted)])
        classes += [readable(name) for name, taken in zip(names, wanted, strict=True) if taken]
    known = sorted(set(classes))
    labels = torch.tensor([known.index(each) for each in classes], device=settings.device)
    return torch.cat(rows), labels, known


@torch.no_grad()
def features(
    pair: Any, path: str, task: Task, rows: Tensor, settings: Settings, kept: Path, part: str = "train"
) -> Tensor:
    """(row, feature) Of rows of a part: each computed once, since they do not depend on what is tested."""
    facts = json.dumps([settings.images, path, settings.size, part])
    file = kept / f"features-{hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()}.safetensors"
    table = load_file(file) if file.exists() else {"rows": torch.empty(0, dtype=torch.long)}
    new = rows[~torch.isin(rows, table["rows"])]
    batches = new.split(64 if settings.device == "cpu" else 512) if len(new) else ()
    for number, some in enumerate(batches):
        if number + 1 < len(batches):
            getattr(task, part).prefetch(batches[number + 1])
        pixels = getattr(task, part).take(some).inputs["pixel_values"].to(settings.device)
        found = pair.visual_projection(pair.vision_model(pixel_values=pixels).pooler_output).cpu()
        images = torch.cat([table["images"], found]) if "images" in table else found
        table = {"rows": torch.cat([table["rows"], some]), "images": images}
        if settings.device == "cpu" or some is batches[-1]:  # on a CPU, an image takes long
            save_file(table, file)
    places = {row: place for place, row in enumerate(table["rows"].tolist())}
    return table["images"][torch.tensor([places[row] for row in rows.tolist()])].to(settings.device)


def test_features(pair: Any, path: str, task: Task, settings: Settings, kept: Path) -> Tensor:
    return features(pair, path, task, test_rows(task, settings), settings, kept, "test")


def test_rows(task: Task, settings: Settings) -> Tensor:
    """Every so many images of the test part."""
    return torch.arange(0, len(task.test), -(-len(task.test) // settings.most))


def public_rows(task: Task, count: int, key: Key) -> Tensor:
    """Rows of the train part that the fit may see: `count` of each class, drawn by the key."""
    drawn = []
    for label, name in enumerate(task.classes):
        rows = (task.train.targets == label).nonzero().flatten()
        if len(rows) <= count:
            raise SystemExit(f"'{name}' of {task.name} has {len(rows)} images; give a --public below that")
        drawn.append(rows[(key / "public" / task.name / str(label)).permutation(len(rows))[:count]])
    return torch.cat(drawn).sort().values


def write_rest(source: Path, rows: Tensor, folder: Path, keep: tuple[int, int] | None = None) -> dict[str, Any]:
    """Write a tested folder without the public images and without copies of them, so that no client holds one.

    With `keep`, only the first so many rows of what is left of the train part and of the test part are written.
    """
    table = parquet.read_table(source / "train.parquet")
    images = [hashlib.blake2b(image["bytes"]).digest() for image in table["image"].to_pylist()]
    public = {images[row] for row in rows.tolist()}
    kept = [row for row, image in enumerate(images) if image not in public]
    folder.mkdir(parents=True, exist_ok=True)
    written = kept[: keep[0]] if keep else kept
    parquet.write_table(table.take(written), folder / "train.parquet")
    if keep:
        parquet.write_table(parquet.read_table(source / "test.parquet").slice(0, keep[1]), folder / "test.parquet")
    else:
        shutil.copyfile(source / "test.parquet", folder / "test.parquet")
    tested = parquet.read_table(source / "test.parquet", columns=["image"])["image"].to_pylist()
    return {
        "rows": rows.tolist(),
        "copies_in_train": len(images) - len(kept) - len(rows),
        "copies_in_test": sum(hashlib.blake2b(image["bytes"]).digest() in public for image in tested),
        "rows_left": len(kept),
        "rows_written": len(written),
        "public_digest": hashlib.blake2b(b"".join(sorted(public)), digest_size=16).hexdigest(),
        "train_digest": hashlib.blake2b((folder / "train.parquet").read_bytes(), digest_size=16).hexdigest(),
    }


def shown(pair: Any, tests: dict[str, Task], settings: Settings, kept: Path) -> tuple[Tensor, Tensor, list[str]]:
    """(image, feature) Of the public images, the class of each, and the classes of all folders."""
    found, labels, names = [], [], []
    for path in settings.test:
        task = tests[Path(path).name]
        rows = public_rows(task, settings.public, Key(settings.seed))
        found.append(features(pair, path, task, rows, settings, kept))
        labels.append(task.train.targets[rows].to(settings.device) + len(names))
        names += [readable(name) for name in task.classes]
    if len(set(names)) < len(names):
        raise SystemExit("two tested folders share a class; give --public with one of them at a time")
    return torch.cat(found), torch.cat(labels), names


@torch.no_grad()
def pooled(pair: Any, tokenizer: Any, texts: Iterable[str]) -> Tensor:
    tokens = tokenizer(list(texts), padding=True, return_tensors="pt").to(pair.device)
    states: Tensor = pair.text_model(**tokens).pooler_output  # (text, width)
    return states


def prototypes(images: Tensor, labels: Tensor, classes: int) -> Tensor:
    sums = torch.zeros(classes, images.shape[1]).to(images).index_add(0, labels, images)
    return functional.normalize(sums)


def without_mean(rows: Tensor) -> Tensor:
    """The projection that takes the direction of the rows' mean out; a projection layer has no bias to subtract it."""
    direction = functional.normalize(rows.mean(0), dim=0)
    return torch.eye(len(direction)).to(rows) - torch.outer(direction, direction)


def telling(images: Tensor, labels: Tensor) -> Tensor:
    """(feature, feature): keeps of an image's feature what tells classes apart, since cosines see all directions alike.

    What all images have in common is taken out, and what differs among images of one class is made small.
    """
    common = without_mean(functional.normalize(images))
    rest = functional.normalize(images) @ common
    counts = torch.bincount(labels).unsqueeze(1)
    means = torch.zeros(len(counts), rest.shape[1]).to(rest).index_add(0, labels, rest) / counts
    inside = rest - means[labels]
    spread = inside.T @ inside / len(inside)
    floor = spread.trace() / len(spread) + 1e-6  # images of one class may all be the same
    values, vectors = torch.linalg.eigh(spread + floor * torch.eye(len(spread)).to(spread))
    return vectors @ torch.diag(values**-0.5) @ vectors.T @ common


def fit(texts: Tensor, wanted: Tensor, ridge: float, weights: Tensor | None = None) -> Tensor:
    """(feature, width): ridge regression of each class's mean image (class, feature) on its texts (template, class,
    width). Classes count by their weights, (class,).
    """
    apart = without_mean(texts.flatten(0, 1))
    given = texts.flatten(0, 1) @ apart
    penalty = ridge * len(given) * given.square().mean() * torch.eye(given.shape[1]).to(given)
    counted = given if weights is None else given * weights.repeat(len(texts)).unsqueeze(1)
    return torch.linalg.solve(given.T @ counted + penalty, counted.T @ wanted.repeat(len(texts), 1)).T @ apart


def weights(classes: int, known: int, share: float, like: Tensor) -> Tensor:
    """(class,): 1 for classes learnt from, and `share` for the tested ones, which come after them."""
    counts = torch.ones(classes, device=like.device)
    counts[known:] = share
    return counts


def choose_public(texts: Tensor, images: Tensor, labels: Tensor, known: int) -> tuple[float, float, dict[str, float]]:
    """The ridge and the weight of tested classes by which public images kept out of the fit find their class best.

    The public images are halved; each half is classified by the map that was fitted with the other.
    """
    own = (labels >= known).nonzero().flatten()
    halves = [own[0::2], own[1::2]]
    classes, tried = texts.shape[1], {}
    for ridge in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
        for share in (1.0, 3.0, 10.0, 30.0):
            right = 0
            for other in halves:
                inside = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
                inside[other] = False
                wanted = prototypes(images[inside], labels[inside], classes)
                weight = fit(texts, wanted, ridge, weights(classes, known, share, labels))
                answers = (images[other] @ functional.normalize(texts[0, known:] @ weight.T).T).argmax(1) + known
                right += int((answers == labels[other]).sum())
            tried[ridge, share] = right / len(own)
    best = max(tried, key=lambda each: tried[each])
    return *best, {"held_out_images": round(tried[best], 4)}


def choose(texts: Tensor, images: Tensor, labels: Tensor, seed: int) -> tuple[float, dict[str, float]]:
    """The ridge by which classes kept out of the fit are told apart best, and how well."""
    order = (Key(seed) / "folds").permutation(texts.shape[1]).to(labels.device)
    tried = {}
    for ridge in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0):
        right = sum(fold(texts, images, labels, order[first::5], ridge) for first in range(5))
        tried[ridge] = right / len(labels)
    best = max(tried, key=lambda each: tried[each])
    return best, {"accuracy": round(tried[best], 4), "chance": round(5 / texts.shape[1], 4)}


def fold(texts: Tensor, images: Tensor, labels: Tensor, out: Tensor, ridge: float) -> float:
    """How many images of the classes kept out find their own among these."""
    inside = torch.ones(texts.shape[1], dtype=torch.bool, device=labels.device)
    inside[out] = False
    weight = fit(texts[:, inside], prototypes(images, labels, texts.shape[1])[inside], ridge)
    theirs = ~inside[labels]
    answers = out[(images[theirs] @ functional.normalize(texts[0, out] @ weight.T).T).argmax(1)]
    return float((answers == labels[theirs]).sum())


def temperature(texts: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """The logarithm of the scale of cosines under which the classes learnt from are likeliest."""
    cosines = images @ functional.normalize(texts).T
    scales = torch.linspace(0, 4.6, 93).to(cosines)
    losses = torch.stack([functional.cross_entropy(scale.exp() * cosines, labels) for scale in scales])
    return scales[losses.argmin()].clone()


def zero_shot(folder: Path, task: Task, images: Tensor, settings: Settings) -> dict[str, float]:
    """As a run measures it: by the model 'clip', from the features of images of the test part."""
    model = clip(task, Key(0), path=str(folder))
    targets = task.test.targets[test_rows(task, settings)]
    table = Table({CACHED_STATES: images.cpu().unsqueeze(1)}, targets)
    accuracy = score(model, model.initial, table)["accuracy"]
    return {"accuracy": round(accuracy, 4), "chance": round(1 / len(task.classes), 4), "images": len(targets)}


def make_tiny(folder: Path) -> Settings:
    """Random towers, and images whose color is their class."""
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as Picture
    from transformers import BertConfig, BertModel, BertTokenizer, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    shape: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    colors = {"red": "#f00", "green": "#0f0", "blue": "#00f", "white": "#fff", "grey": "#666"}
    phrases = [word for template in TEMPLATES for word in re.findall(r"\w+|\.", template)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *colors, "black", "yellow", *phrases]
    tokenizer = BertTokenizer(vocab={word: place for place, word in enumerate(dict.fromkeys(words))})
    with without_logs():
        Dinov2Model(Dinov2Config(**shape, mlp_ratio=2, image_size=8, patch_size=4)).save_pretrained(folder / "images")
        BertModel(BertConfig(**shape, intermediate_size=32, vocab_size=len(tokenizer))).save_pretrained(folder / "text")
    tokenizer.save_pretrained(folder / "text")
    sets = {"learn": colors, "test": {"black": "#000", "yellow": "#ff0"}}
    for name, known in sets.items():
        columns = {
            "image": [Picture.new("RGB", (8, 8), known[c]) for c in known] * 4,
            "label": list(range(len(known))) * 4,
        }
        features = Features({"image": Image(), "label": ClassLabel(names=list(known))})
        (folder / name).mkdir()
        for part in ("train", "test"):
            Dataset.from_dict(columns, features).to_parquet(folder / name / f"{part}.parquet")
    where = {name: (str(folder / name),) for name in sets}
    return Settings(
        str(folder / "images"), str(folder / "text"), where["learn"], where["test"], 8, 4, 8, False, 0, "cpu"
    )


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", help="folder or hub id of the tower of images: a DINOv2, or a CLIP's image tower")
    parser.add_argument("--text", help="folder or hub id of a BERT whose first token stands for the sentence, as BGE's")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="where the folders below are")
    parser.add_argument("--learn", nargs="+", default=["tinyimagenet32", "caltech101", "cifar100"])
    parser.add_argument("--test", nargs="+", default=["office_caltech10", "pacs"])
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--per-class", type=int, default=50)
    parser.add_argument("--most", type=int, default=4000, help="images of each test part")
    parser.add_argument("--met", action="store_true", help="learn from other folders' images of tested classes, too")
    parser.add_argument(
        "--public", type=int, default=0, help="images of each tested class for the fit, which no client holds then"
    )
    parser.add_argument(
        "--keep", type=int, nargs=2, metavar=("TRAIN", "TEST"), help="with --public: images left for clients; all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(given)
    if both := sorted(set(asked.learn) & set(asked.test)):
        parser.error(f"{both[0]} is both to learn from and to test on; leave it out of one")
    if asked.tiny:
        settings = make_tiny(asked.out)
    elif asked.images and asked.text:
        learn, test = (tuple(str(asked.data / name) for name in names) for names in (asked.learn, asked.test))
        rest = (asked.size, asked.per_class, asked.most, asked.met, asked.seed, asked.device, asked.public)
        keep = tuple(asked.keep) if asked.keep else None
        settings = Settings(asked.images, asked.text, learn, test, *rest, keep)
    else:
        parser.error("give --images and --text, or --tiny")
    return align(settings, asked.out / "pair" if asked.tiny else asked.out)


if __name__ == "__main__":
    print(json.dumps({key: value for key, value in main().items() if key != "names"}, indent=1))
