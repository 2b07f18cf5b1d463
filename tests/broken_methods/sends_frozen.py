"""A transform that sends what the plan has frozen."""

from dataclasses import replace

import torch

from partita import Key, Method, Model, Plan, RoundInfo, Update, UpdateTransform, share
from partita.core.tensors import Slots


class SendsAll(UpdateTransform):
    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        return replace(update, delta={**update.delta, "head.weight": torch.zeros(3, 4)}), {}


def plan(model: Model, round_info: RoundInfo) -> Plan:
    return share(train=model.all_names() - model.names("head"), down=model.all_names())


def broken() -> Method:
    return Method("broken", plan, transforms=(SendsAll(),))
