"""Transformers: a ``Trainer`` that survives the loss of workers, and a callback for scripts that stay on DDP.

::

    from transformers import TrainingArguments

    from holdfast.integrations.transformers import Trainer

    trainer = Trainer(model=model, args=TrainingArguments(...), train_dataset=dataset)
    trainer.train()

Import :class:`Trainer` before ``TrainingArguments`` is created: from then on Accelerate sees one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.lazy import lazy

if TYPE_CHECKING:
    from holdfast.integrations.transformers_callback import HoldfastCallback
    from holdfast.integrations.transformers_trainer import Seq2SeqTrainer, Trainer

__all__ = ["HoldfastCallback", "Seq2SeqTrainer", "Trainer"]

_TRAINER = "holdfast.integrations.transformers_trainer"
_WHERE = {
    "HoldfastCallback": "holdfast.integrations.transformers_callback",
    "Seq2SeqTrainer": _TRAINER,
    "Trainer": _TRAINER,
}

__getattr__ = lazy(__name__, _WHERE)  # a script that only needs the callback keeps its process group
