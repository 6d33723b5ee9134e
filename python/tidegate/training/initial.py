"""Weights that a run begins with: a saved model, a run, or a checkpoint from elsewhere."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .._sharding import share_of
from ..models import LMConfig
from ..models.block import CONFIG_FILE
from .checkpoint import RunFolder
from .checkpoint_content import weights_problem
from .errors import UserError
from .tokenizers import BYTES, TOKENIZER_FILE, ByteTokenizer


class Initial(NamedTuple):
    """A model's configuration and weights, and the file of its tokenizer, where it has one."""

    name: str
    config: LMConfig
    tensors: dict[str, Tensor]
    tokenizer: Path | None

    def settle(self, values: dict[str, object]) -> None:
        """Puts the model's tokenizer into training settings that name none.

        Raises:
            UserError: the data is text, and nothing says how it becomes the model's ids.
        """
        if str(values.get("data", "")).endswith((".npy", ".bin")) or "tokenizer" in values:
            return
        if self.tokenizer is not None:
            values["tokenizer"] = str(self.tokenizer)
        elif self.config.vocab_size != ByteTokenizer.vocab_size:
            raise UserError(
                f"init-from: {self.name} has no {TOKENIZER_FILE}, and its vocabulary is "
                f"{self.config.vocab_size}, not that of bytes: name its --tokenizer "
                f"({BYTES} too, if you mean it), or train on token ids"
            )

    def checksum(self) -> int:
        """CRC-32 of the configuration and the weights, by which processes that read the same path
        know that they read the same model."""
        return zlib.crc32(self.config.to_json().encode(), self.weights_checksum())

    def weights_checksum(self) -> int:
        """CRC-32 of the weights, by which a run knows later whether its path still holds them. The
        configuration is no part of it: its text grows with tidegate's versions."""
        found = 0
        for name, t in sorted(self.tensors.items()):
            found = zlib.crc32(name.encode(), found)
            found = zlib.crc32(t.contiguous().flatten().view(torch.uint8).numpy(), found)
        return found

    def load_into(self, model: torch.nn.Module) -> None:
        """Copies the weights into `model`, in the model's dtypes; of one that is sharded, this
        process's parts.

        Raises:
            UserError: a tensor is missing, has no place, or has another shape.
        """
        own = model.state_dict()
        given = {
            name: share_of(t.to(own[name].dtype), own[name])
            if name in own and t.shape == own[name].shape
            else t
            for name, t in self.tensors.items()
        }
        if problem := weights_problem(model, given):
            raise UserError(f"init-from: {self.name} does not fit the model: {problem}")
        model.load_state_dict(given)


def open_initial(path: str) -> Initial:
    """The model in folder `path`: what `CausalLM.save` wrote, a run, or what `tidegate convert`
    reads (flash-linear-attention's checkpoints and others').

    Raises:
        UserError: there is none, or a file is damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"init-from: {path}: no such folder")
    if RunFolder(path).has_checkpoint:
        from .trained import load_trained

        model = load_trained(path, "cpu").model
    else:
        from ..convert import format_of, read, read_json

        try:
            config = read_json(folder / CONFIG_FILE)
            model = read(folder, config, format_of(config)).model
        except (ValueError, OSError, ImportError) as error:
            raise UserError(f"init-from: {error}") from error
    kept = folder / TOKENIZER_FILE
    return Initial(path, model.config, model.state_dict(), kept if kept.is_file() else None)
