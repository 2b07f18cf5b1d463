"""A pair of towers from one of images and one of texts that never met: the text side is fitted to the frozen images.

python studies/backbone/align.py --images DINOV2 --text MINILM --out FOLDER
python studies/backbone/align.py --tiny --out FOLDER      random towers and made-up images, in seconds

The folder is a plain transformers VisionTextDualEncoderModel with its tokenizer, and alignment.json beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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
from partita.evaluate import score
from partita.models.adapter import quiet
from partita.models.prompts.clip import clip

TEMPLATES = ("a photo of a {}.", "{}", "a picture of the {}.", "a small photo of one {}.", "this is a {}.")
STATISTICS = {  # of the pixels that each tower was trained on
    "dinov2": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
# Classes to learn from that are kinds of a class to be tested on, though no word of their names says so.
KINDS = """
German shepherd, Labrador retriever, golden retriever, Yorkshire terrier, Chihuahua, standard poodle, dalmatian,
snoopy, tabby, garfield, bullfrog, tailed frog, sports car, convertible, limousine, beach wagon, car side, moving van,
police van, ferry, ketch, schooner, gondola, lifeboat, albatross, goose, king penguin, black stork, crane, ibis,
flamingo, flamingo head, pigeon, rooster, emu, gazelle, gerenuk, monarch, tarantula, black widow, ladybug, hawksbill,
ox, bison, goldfish, alp, cliff, seashore, viaduct, boa constrictor, American alligator, trolleybus, bell pepper,
desk, pay-phone, cellphone, lampshade, watch, stopwatch, hourglass, projectile, barn, cliff dwelling, thatch, Faces,
airplanes, iPod, helicopter, joshua tree, bonsai, lotus, water lilly, guinea pig, beer bottle, pop bottle, pill
bottle, espresso, CD player, Motorbikes, freight car
"""


@dataclass(frozen=True)
class Settings:
    images: str
    text: str
    learn: tuple[str, ...]  # folders of images to learn from
    test: tuple[str, ...]  # folders of images to test on, none of whose classes is learnt from
    size: int
    per_class: int
    words: int
    plain: bool  # leave what differs among images of one class as it is
    seed: int
    device: str


def align(settings: Settings, out: Path) -> dict[str, Any]:
    begun = time.perf_counter()
    torch.manual_seed(settings.seed)
    pair, tokenizer, statistics = towers(settings)
    pair.to(settings.device).eval().requires_grad_(False)
    read = reader(settings, statistics)
    tests = {Path(path).name: read(path) for path in settings.test}
    taboo = {word for task in tests.values() for name in task.classes for word in words_of(name)}
    images, labels, names = features(pair, [read(path) for path in settings.learn], taboo, settings, out)
    sentences = pool_like_sentences(pair, tokenizer, settings)
    spread = without_mean(functional.normalize(images)) if settings.plain else telling(images, labels)
    pair.visual_projection.weight.data = spread @ pair.visual_projection.weight.data
    images = functional.normalize(images @ spread.T)
    texts = torch.stack([pooled(pair, tokenizer, [t.format(name) for name in names]) for t in TEMPLATES])
    ridge, steps, kept_out = choose(texts, images, labels, settings.seed)
    weight = fit(texts, images, labels, ridge, steps)
    pair.text_projection.weight.data = weight
    pair.logit_scale.data = temperature(texts[0] @ weight.T, images, labels)
    out.mkdir(parents=True, exist_ok=True)
    with quiet():
        pair.cpu().save_pretrained(out)
    tokenizer.save_pretrained(out)
    result = {
        "images": Path(settings.images).name,
        "text": Path(settings.text).name,
        "size": settings.size,
        "plain": settings.plain,
        "classes": len(names),
        "learnt_from": len(labels),
        "sentence_cosine": round(sentences, 4),
        "ridge": ridge,
        "steps": steps,
        "accuracy_on_classes_kept_out": round(kept_out, 4),
        "zero_shot": {name: zero_shot(out, task, settings.device) for name, task in tests.items()},
        "seconds": round(time.perf_counter() - begun, 1),
        "names": names,
    }
    (out / "alignment.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def towers(settings: Settings) -> tuple[Any, Any, tuple[tuple[float, ...], tuple[float, ...]]]:
    """The two put side by side; images keep their own features, or CLIP's projection of them."""
    with quiet():
        text, tokenizer = AutoModel.from_pretrained(settings.text), AutoTokenizer.from_pretrained(settings.text)
        kind = str(AutoConfig.from_pretrained(settings.images).model_type)
        if kind.startswith("clip"):
            whole = CLIPVisionModelWithProjection.from_pretrained(settings.images)
            sight, projection = whole.vision_model, whole.visual_projection.weight.detach()
        else:
            sight = AutoModel.from_pretrained(settings.images)
            projection = torch.eye(sight.config.hidden_size)
        pair = VisionTextDualEncoderModel(vision_model=sight, text_model=text)
    pair.config.projection_dim = pair.projection_dim = len(projection)
    pair.visual_projection = nn.Linear(projection.shape[1], len(projection), bias=False)
    pair.visual_projection.weight.data = projection.clone()
    pair.text_projection = nn.Linear(text.config.hidden_size, len(projection), bias=False)
    return pair, tokenizer, STATISTICS["clip" if kind.startswith("clip") else "dinov2"]


def reader(settings: Settings, statistics: tuple[tuple[float, ...], tuple[float, ...]]) -> Any:
    def read(path: str) -> Task:
        mean, std = statistics
        return data.load("images", Key(settings.seed), path=path, size=settings.size, mean=mean, std=std)

    return read


def words_of(name: str) -> set[str]:
    """In the singular, as far as an s at the end tells."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z]+", name.lower())}


def readable(name: str) -> str:
    return name.replace("_", " ")


def learnable(name: str, taboo: set[str]) -> bool:
    """Whether a class is none of those to be tested on, nor a kind of one, nor named after one."""
    kinds = {each.strip() for each in KINDS.replace("\n", " ").split(",")}
    return not words_of(name) & taboo and readable(name) not in kinds


@torch.no_grad()
def features(
    pair: Any, tasks: Sequence[Task], taboo: set[str], settings: Settings, out: Path
) -> tuple[Tensor, Tensor, list[str]]:
    """(image, feature), the class of each image, and the classes; computed once, and then read from the folder."""
    wanted = [(task, place) for task in tasks for place, name in enumerate(task.classes) if learnable(name, taboo)]
    names = sorted({readable(task.classes[place]).lower() for task, place in wanted})
    facts = json.dumps([settings.images, settings.learn, settings.size, settings.per_class, names])
    known = out / f"features-{hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()}.safetensors"
    if known.exists():
        held = load_file(known, settings.device)
        return held["images"], held["labels"], names
    rows, labels = [], []
    for task, place in wanted:
        which = (task.train.targets == place).nonzero().flatten()[: settings.per_class]
        for some in which.split(64):
            pixels = task.train.take(some).inputs["pixel_values"].to(settings.device)
            rows.append(pair.visual_projection(pair.vision_model(pixel_values=pixels).pooler_output))
            labels += [names.index(readable(task.classes[place]).lower())] * len(some)
    images, targets = torch.cat(rows), torch.tensor(labels, device=settings.device)
    out.mkdir(parents=True, exist_ok=True)
    save_file({"images": images, "labels": targets}, known)
    return images, targets, names


@torch.no_grad()
def pool_like_sentences(pair: Any, tokenizer: Any, settings: Settings) -> float:
    """Have the pooler make of the first token what a sentence encoder makes of all: the mean of its states.

    transformers' pair looks at the pooler alone. The fit is linear, on words of the vocabulary in templates. Returns
    the mean cosine on words that it was not fitted on.
    """
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
    order = (Key(settings.seed) / "words").permutation(len(words))[: settings.words].tolist()
    phrases = [TEMPLATES[place % len(TEMPLATES)].format(words[row]) for place, row in enumerate(order)]
    firsts, means = [], []
    for start in range(0, len(phrases), 256):
        tokens = tokenizer(phrases[start : start + 256], padding=True, return_tensors="pt").to(settings.device)
        states = pair.text_model(**tokens).last_hidden_state  # (phrase, token, width)
        seen = tokens["attention_mask"].unsqueeze(-1)
        firsts.append(states[:, 0])
        means.append((states * seen).sum(1) / seen.sum(1))
    given, wanted = torch.cat(firsts), functional.normalize(torch.cat(means))
    wanted = wanted - wanted.mean(0)
    wanted = 0.3 * wanted / wanted.abs().max()  # small enough for the pooler's tanh to be nearly straight
    ones = torch.ones(len(given), 1).to(given)
    given = torch.cat([given, ones], 1)
    train = len(given) * 4 // 5
    penalty = torch.eye(given.shape[1]).to(given)
    weight = torch.linalg.solve(given[:train].T @ given[:train] + penalty, given[:train].T @ wanted[:train])
    pair.text_model.pooler.dense.weight.data = weight[:-1].T.contiguous()
    pair.text_model.pooler.dense.bias.data = weight[-1].clone()
    return float(functional.cosine_similarity((given[train:] @ weight).tanh(), wanted[train:]).mean())


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


def fit(texts: Tensor, images: Tensor, labels: Tensor, ridge: float, steps: int) -> Tensor:
    """(feature, width): from ridge regression of each class's mean image on its texts (template, class, width), then a
    few steps that have every image find its own class among all.
    """
    apart = without_mean(texts.flatten(0, 1))
    given = texts.flatten(0, 1) @ apart
    wanted = prototypes(images, labels, texts.shape[1]).repeat(len(texts), 1)
    penalty = ridge * len(given) * given.square().mean() * torch.eye(given.shape[1]).to(given)
    start = torch.linalg.solve(given.T @ given + penalty, given.T @ wanted).T @ apart
    weight, scale = start.clone().requires_grad_(), torch.tensor(3.0, device=given.device, requires_grad=True)
    optimizer = torch.optim.Adam([weight, scale], lr=float(start.std()) * 0.01)
    for step in range(steps):
        made = functional.normalize(texts[step % len(texts)] @ weight.T)
        loss = functional.cross_entropy(scale.exp() * images @ made.T, labels)
        # Far from the regression it would fit the classes it knows and no others.
        loss = loss + (weight - start).square().sum() / start.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weight.detach()


def choose(texts: Tensor, images: Tensor, labels: Tensor, seed: int) -> tuple[float, int, float]:
    """The ridge and the steps by which classes kept out of the fit are told apart best, and how well."""
    order = (Key(seed) / "folds").permutation(texts.shape[1]).to(labels.device)

    def kept_out(ridge: float, steps: int) -> float:
        right = sum(fold(texts, images, labels, order[first::5], ridge, steps) for first in range(5))
        return right / len(labels)

    ridges = {ridge: kept_out(ridge, 0) for ridge in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)}
    ridge = max(ridges, key=lambda each: ridges[each])
    found = {0: ridges[ridge], **{steps: kept_out(ridge, steps) for steps in (50, 200)}}
    steps = max(found, key=lambda each: found[each])
    return ridge, steps, found[steps]


def fold(texts: Tensor, images: Tensor, labels: Tensor, out: Tensor, ridge: float, steps: int) -> float:
    """How many images of the classes kept out find their own among these."""
    inside = torch.ones(texts.shape[1], dtype=torch.bool, device=labels.device)
    inside[out] = False
    place, mine = torch.cumsum(inside, 0) - 1, inside[labels]
    weight = fit(texts[:, inside], images[mine], place[labels[mine]], ridge, steps)
    answers = out[(images[~mine] @ functional.normalize(texts[0, out] @ weight.T).T).argmax(1)]
    return float((answers == labels[~mine]).sum())


def temperature(texts: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """The logarithm of the scale of cosines under which the classes learnt from are likeliest."""
    cosines = images @ functional.normalize(texts).T
    scales = torch.linspace(0, 4.6, 93).to(cosines)
    losses = torch.stack([functional.cross_entropy(scale.exp() * cosines, labels) for scale in scales])
    return scales[losses.argmin()].clone()


def zero_shot(folder: Path, task: Task, device: str) -> dict[str, float]:
    """As a run measures it: by the model 'clip' on the test part."""
    model = clip(task, Key(0), path=str(folder))
    model.to(torch.device(device))
    accuracy = score(model, model.initial, task.test)["accuracy"]
    return {"accuracy": round(accuracy, 4), "chance": round(1 / len(task.classes), 4)}


def make_tiny(folder: Path) -> Settings:
    """Random towers, and images whose colour is their class."""
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as Picture
    from transformers import BertConfig, BertModel, BertTokenizer, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    shape: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    colours = {"red": "#f00", "green": "#0f0", "blue": "#00f", "white": "#fff", "grey": "#666"}
    phrases = [word for template in TEMPLATES for word in re.findall(r"\w+|\.", template)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *colours, "black", "yellow", *phrases]
    words += [f"word{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = BertTokenizer(vocab={word: place for place, word in enumerate(dict.fromkeys(words))})
    with quiet():
        Dinov2Model(Dinov2Config(**shape, mlp_ratio=2, image_size=8, patch_size=4)).save_pretrained(folder / "images")
        BertModel(BertConfig(**shape, intermediate_size=32, vocab_size=len(tokenizer))).save_pretrained(folder / "text")
    tokenizer.save_pretrained(folder / "text")
    sets = {"learn": colours, "test": {"black": "#000", "yellow": "#ff0"}}
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
        str(folder / "images"), str(folder / "text"), where["learn"], where["test"], 8, 4, 40, False, 0, "cpu"
    )


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", help="folder or hub id of the tower of images: a DINOv2, or a CLIP's image tower")
    parser.add_argument("--text", help="folder or hub id of the tower of texts: a sentence encoder of BERT's kind")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="where the folders below are")
    parser.add_argument("--learn", nargs="+", default=["tinyimagenet32", "caltech101"])
    parser.add_argument("--test", nargs="+", default=["cifar10", "cifar100", "office_caltech10", "pacs"])
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--per-class", type=int, default=50)
    parser.add_argument("--words", type=int, default=8000)
    parser.add_argument("--plain", action="store_true", help="only take out what all images have in common")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(given)
    if asked.tiny:
        settings = make_tiny(asked.out)
    elif asked.images and asked.text:
        learn, test = (tuple(str(asked.data / name) for name in names) for names in (asked.learn, asked.test))
        numbers = (asked.size, asked.per_class, asked.words, asked.plain, asked.seed, asked.device)
        settings = Settings(asked.images, asked.text, learn, test, *numbers)
    else:
        parser.error("give --images and --text, or --tiny")
    return align(settings, asked.out / "pair" if asked.tiny else asked.out)


if __name__ == "__main__":
    print(json.dumps({key: value for key, value in main().items() if key != "names"}, indent=1))
