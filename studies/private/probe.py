"""Describe the features on which a linear head trains, without privacy: why a warm start helps or does not.

    python studies/private/probe.py OHSUMED ENCODER...

For each encoder: the length of its mean-pooled features, the mean cosine of two texts, how many directions carry the
variance (the participation ratio of the covariance's eigenvalues), and the test accuracy of a logistic regression on
all training texts together, with features as they are and standardized. Regularization is scikit-learn's default.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoModel, AutoTokenizer

TOKENS, BATCH = 64, 64


def features(folder: str, texts: list[str]) -> Any:
    """Return the mean over each text's tokens of the encoder's last states, (text, width)."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    found = []
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(
            texts[start : start + BATCH], truncation=True, max_length=TOKENS, padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        found.append((states * mask).sum(1) / mask.sum(1))
    return torch.cat(found).double().numpy()


def describe(train: Any) -> list[str]:
    """Return the length, the mean cosine and the participation ratio of features, as text."""
    lengths = np.linalg.norm(train, axis=1)
    units = train / lengths[:, None]
    count = len(units)
    cosine = (np.square(np.linalg.norm(units.sum(0))) - count) / (count * (count - 1))
    values = np.linalg.eigvalsh(np.cov(train.T))
    return [f"{lengths.mean():.2f}", f"{cosine:.2f}", f"{values.sum() ** 2 / np.square(values).sum():.0f}"]


def main() -> None:
    data, *encoders = sys.argv[1:]
    tables = {part: pd.read_parquet(Path(data) / f"{part}.parquet") for part in ("train", "test")}
    labels = {part: table["label"].to_numpy() for part, table in tables.items()}
    print("| encoder | length | cosine | directions | logistic regression | standardized |")
    print("|---|--:|--:|--:|--:|--:|")
    for folder in encoders:
        found = {part: features(folder, table["text"].tolist()) for part, table in tables.items()}
        models = [make_pipeline(*steps, LogisticRegression(max_iter=1000)) for steps in ((), (StandardScaler(),))]
        scores = [model.fit(found["train"], labels["train"]).score(found["test"], labels["test"]) for model in models]
        cells = [*describe(found["train"]), *(f"{100 * score:.1f}" for score in scores)]
        print(f"| {folder} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
