"""tidegate's language models as transformers' models: one class over all mixers.

In the order of transformers' own modeling files: what the models share (TidegatePreTrainedModel),
embedding, blocks and norm (TidegateModel), the language model (TidegateForCausalLM) and the
classifier (TidegateForSequenceClassification). How padded and packed batches are read is in
packing.py, states as layers of transformers' caches in cache.py.

Parameters are `tidegate.models.CausalLM`'s, under ``model.``, but for the head, which is
``lm_head``; what a seed draws is the same, too.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from .. import ops
from ..models import CausalLM
from ..models.block import Model, embedding_std, refuse_run
from ..models.classifiers import mean_over_time, mean_pool
from ..nn._common import KeepsFloat32, Linear, is_plain, make_linear, normal_, reset_linear
from .cache import adopt
from .config import STUB, TidegateConfig
from .packing import PACKED, Tokens, check_past, lay_out, packing_from

# What transformers calls the cache in its outputs, which it renamed on the way through version 5.
_CACHE = "cache"
if _CACHE not in {f.name for f in dataclasses.fields(BaseModelOutputWithPast)}:
    _CACHE = "past_key_values"


_STUB_TEXT = '''"""For from_pretrained(..., trust_remote_code=True): pip install 'tidegate[hf]'."""

from tidegate.hf import (  # noqa: F401
    TidegateConfig,
    TidegateForCausalLM,
    TidegateForSequenceClassification,
    TidegateModel,
)
'''


class TidegatePreTrainedModel(PreTrainedModel):
    """What the models share: the configuration, and how missing parameters are drawn."""

    config_class = TidegateConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    # Arguments that accelerate must not move to a block's device: they are there, or on the host.
    _skip_keys_device_placement = ["cache", "past_key_values", "state"]
    _is_stateful = True
    _can_compile_fullgraph = False

    def _finish(self) -> None:
        """The last lines of a constructor. Parameters were drawn, but on the meta device, where
        from_pretrained() fills them."""
        if all(not p.is_meta for p in self.parameters()):
            for module in self.modules():
                module._is_hf_initialized = True  # so that transformers does not draw them again
        # Whole names, since transformers looks for them anywhere in a parameter's.
        self._keep_in_fp32_modules_strict = [
            f"{owner}.{name}".lstrip(".")
            for owner, module in self.named_modules()
            if isinstance(module, KeepsFloat32)
            for name in module._float32_names
        ]
        self.post_init()

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """transformers' own, and beside it the file that config.json's auto_map names. Raises
        ValueError for a run folder of `tidegate train`, whose config.json would be lost."""
        refuse_run(f"{type(self).__name__}.save_pretrained", Path(save_directory))
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / f"{STUB}.py").write_text(_STUB_TEXT, encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: transformers would copy this file, which is a package's, beside the weights."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draws those of a module's parameters that no file had, or all of a module's that
        resize_token_embeddings() made. What is on the meta device lies in a file of its own, from
        which accelerate reads it when it is needed."""
        own = {
            **dict(module.named_parameters(recurse=False)),
            **dict(module.named_buffers(recurse=False)),
        }
        missing = {n for n, t in own.items() if not (_is_initialized(t) or t.is_meta)}
        if not missing:
            return
        owner, path = self._drawn_by(module)
        drawn = {path + name for name in missing}
        tensors = owner.state_dict().items()
        kept = {n: t.clone() for n, t in tensors if n not in drawn and not t.is_meta}
        if isinstance(owner, nn.Embedding):
            normal_(owner.weight, self.config.init_std or embedding_std(self.config.lm_config()))
        elif isinstance(owner, nn.Linear):
            self._draw_linear(owner)
        else:
            owner.reset_parameters()
        owner.load_state_dict(kept, strict=False)

    def _drawn_by(self, module: nn.Module) -> tuple[nn.Module, str]:
        """The block whose reset_parameters() says how the module in it starts, and the way to the
        module from there; the module itself where there is none, or init_std says it."""
        names = {id(m): name for name, m in self.named_modules()}
        path = names.get(id(module), "").split(".")
        for depth in range(1, len(path)) if self.config.init_std is None else ():
            owner = self.get_submodule(".".join(path[:depth]))
            if hasattr(owner, "reset_parameters"):
                return owner, ".".join(path[depth:]) + "."
        return module, ""

    def _draw_linear(self, linear: nn.Linear) -> None:
        std = self.config.init_std
        # A head that is being resized is not the model's yet; every other matrix is in a block.
        is_in_a_block = any(linear is module for module in self.base_model.modules())
        if std is None and self.get_output_embeddings() is not None and not is_in_a_block:
            std = 0.02
        if std is None:
            reset_linear(linear)
            return
        normal_(linear.weight, std)
        if linear.bias is not None:
            linear.bias.zero_()


def _is_initialized(t: Tensor) -> bool:
    return getattr(t, "_is_hf_initialized", False)


class TidegateModel(TidegatePreTrainedModel):
    """Embedding, blocks and final norm: what `CausalLM` is without its head."""

    def __init__(self, config: TidegateConfig) -> None:
        super().__init__(config)
        lm = CausalLM(config.lm_config())
        self.scale = lm.scale
        self.embedding = lm.embedding
        self.lower_bounds = lm.lower_bounds
        self.blocks = lm.blocks
        self.norm = lm.norm
        self.dropout = lm.dropout
        self._drawn_head = [lm.head]  # a list, so that it is no child
        self.gradient_checkpointing = False
        self._finish()

    gammas = Model.gammas

    def take_head(self) -> nn.Linear:
        """The head that belongs to these parameters, drawn after them; once. A tied one is empty
        until it is tied."""
        head, self._drawn_head = self._drawn_head[0], [None]
        if head is not None:
            return head
        weight = self.embedding.weight
        vocab, dim = weight.shape
        head = make_linear(dim, vocab, False, weight.device, weight.dtype)
        if self.config.tie_word_embeddings:
            head.weight = weight
        elif not weight.is_meta:
            normal_(head.weight, self.config.init_std or 0.02)
        return head

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids ``[B, T]`` or inputs_embeds ``[B, T, dim]`` -> the last hidden states
        ``[B, T, dim]``, zeros at padding.

        attention_mask ``[B, T]``, or ``[B, past + T]`` after `past` tokens of the cache: 1 for
        tokens, 0 for padding, on either side; padding enters no state. cu_seq_lens_q (fla's name:
        cu_seqlens), seq_idx, or, without a mask, position_ids that begin anew bound sequences
        packed into a row: no state passes from one to the next. cache, by its old name
        past_key_values: of the tokens before, and these after it; packed sequences have none.
        """
        cache = self._checked_cache(past_key_values if cache is None else cache, use_cache)
        past = 0 if cache is None else cache.layers[0].tokens
        x = self._embed(input_ids, inputs_embeds)
        tokens = lay_out(x, attention_mask, position_ids, past=past, **packing_from(kwargs))
        if cache is None:
            cache = self._new_cache(use_cache, tokens)
        elif tokens.packed:
            raise ValueError(
                "TidegateModel: cache: expected none with packed sequences, which are not the "
                "batch's rows"
            )
        elif past > 0 and attention_mask is not None and not torch.compiler.is_compiling():
            check_past(attention_mask[:, : -tokens.time], cache.layers[0].padding)
        hidden = () if _asked(output_hidden_states, self.config) else None
        if self._is_step(tokens, cache):
            x, hidden = self._step(x, cache, hidden)
        else:
            x, hidden = self._sequences(x, tokens, cache, hidden)
        return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=hidden, **{_CACHE: cache})

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        _check_input("TidegateModel", input_ids, inputs_embeds)
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        return x * self.scale if self.scale != 1.0 else x

    def _checked_cache(self, cache: Any, use_cache: bool | None) -> Cache | None:
        """The cache that was given, with these layers in it; None where none is to be used."""
        if cache is None:
            return None
        if not isinstance(cache, Cache):
            raise TypeError(
                "TidegateModel: cache: expected a Cache of transformers, such as DynamicCache(); "
                f"got {type(cache).__name__}"
            )
        if use_cache is not False:
            return self.adopt(cache)
        if cache.layers and cache.get_seq_length() > 0:
            raise ValueError("TidegateModel: use_cache: expected True with a cache; got False")
        return None

    def _new_cache(self, use_cache: bool | None, tokens: Tokens) -> Cache | None:
        """An empty cache where these tokens are to leave one."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if not use_cache or tokens.packed or (self.gradient_checkpointing and self.training):
            return None
        return self.adopt(DynamicCache())

    def adopt(self, cache: Cache) -> Cache:
        """The cache, with a layer of the kind that each block's state needs."""
        return adopt(cache, [block.mixer for block in self.blocks])

    def _is_step(self, tokens: Tokens, cache: Cache | None) -> bool:
        """Whether each row goes on by one token, without a gradient: the mixers' step(). Where
        accelerate brings weights or inputs to a block, it does so when the block is called."""
        if cache is None or tokens.time != 1 or tokens.padded or torch.is_grad_enabled():
            return False
        return cache.layers[0].tokens > 0 and not any(hasattr(b, "_hf_hook") for b in self.blocks)

    def _step(
        self, x: Tensor, cache: Cache, hidden: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        x = self.dropout(x[:, 0])
        for block, gamma, layer in zip(self.blocks, self.gammas(), cache.layers, strict=True):
            hidden = None if hidden is None else (*hidden, x[:, None])
            state = layer.read(block.mixer, x.size(0), x.device)
            x = block.step(x, state, gamma)
            layer.write(state, 1)
        x = self.norm(x)[:, None]
        return x, None if hidden is None else (*hidden, x)

    def _sequences(
        self,
        x: Tensor,
        tokens: Tokens,
        cache: Cache | None,
        hidden: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        x = self.dropout(tokens.take(x))
        for k, (block, gamma) in enumerate(zip(self.blocks, self.gammas(), strict=True)):
            hidden = None if hidden is None else (*hidden, tokens.put(x))
            if cache is None:
                x = self._through(block, x, gamma, tokens.cu_seqlens)
                continue
            layer = cache.layers[k]
            state = layer.read(block.mixer, tokens.batch, x.device)
            x, state = block(x, state=state, gamma=gamma, cu_seqlens=tokens.cu_seqlens)
            layer.write(state, tokens.time)
        if cache is not None:
            cache.layers[0].add_padding(tokens.padding)
        x = tokens.put(self.norm(x))
        return x, None if hidden is None else (*hidden, x)

    def _through(
        self, block: nn.Module, x: Tensor, gamma: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """A block without a state; its activations computed again where checkpointing is on."""

        def run(x: Tensor, gamma: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
            return block(x, gamma=gamma, cu_seqlens=cu_seqlens)[0]

        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(run, x, gamma, cu_seqlens)
        return run(x, gamma, cu_seqlens)


def _check_input(owner: str, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"{owner}: expected either input_ids or inputs_embeds")


def _asked(output_hidden_states: bool | None, config: TidegateConfig) -> bool:
    if output_hidden_states is None:
        return bool(getattr(config, "output_hidden_states", False))
    return output_hidden_states


class TidegateForCausalLM(TidegatePreTrainedModel, GenerationMixin):
    """A language model: `TidegateModel` and a head, the embedding's transpose where they are tied.

    `from_causal_lm` and `to_causal_lm` go between this and `tidegate.models.CausalLM`, without
    copies.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}

    def __init__(self, config: TidegateConfig) -> None:
        super().__init__(config)
        self.model = TidegateModel(config)
        self.lm_head = self.model.take_head()
        self.vocab_size = config.vocab_size
        self._finish()

    @classmethod
    def from_causal_lm(cls, lm: CausalLM, **config: Any) -> TidegateForCausalLM:
        """Makes a transformers model of `lm` that shares its parameters; config: what transformers
        has beside ours, such as eos_token_id."""
        with torch.device("meta"):
            model = cls(TidegateConfig.from_lm_config(lm.config, **config))
        tensors = {_their_name(name): t for name, t in _tensors(lm).items()}
        if lm.head is None:
            tensors["lm_head.weight"] = lm.embedding.weight
        model.load_state_dict(tensors, strict=True, assign=True)
        model.tie_weights()
        return model.train(lm.training)

    def to_causal_lm(self) -> CausalLM:
        """Makes a CausalLM of this model that shares its parameters. Raises ValueError for what a
        CausalLM would not have: adapters, a bias of the head, a head of its own where the
        configuration ties it, and weights that accelerate has put away."""
        lm = CausalLM(self.config.lm_config(), device="meta")
        mine = _tensors(self)
        if lm.head is None and mine.get("lm_head.weight") is self.model.embedding.weight:
            del mine["lm_head.weight"]
        names = {_their_name(name): name for name in lm.state_dict()}
        if differ := sorted(names.keys() ^ mine.keys()):
            raise ValueError(
                "TidegateForCausalLM.to_causal_lm: expected the parameters of a CausalLM (adapters "
                f"are merged by merge_and_unload() first); they differ by {', '.join(differ[:4])}"
            )
        away = [name for name, t in mine.items() if t.is_meta]
        if away and len(away) < len(mine):
            raise ValueError(
                "TidegateForCausalLM.to_causal_lm: expected a model that was loaded whole; got "
                f"{', '.join(away[:4])} on the meta device"
            )
        lm.load_state_dict({names[n]: t for n, t in mine.items()}, strict=True, assign=True)
        return lm.train(self.training)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        output_hidden_states: bool | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """What `TidegateModel.forward` computes, and logits ``[B, T, vocab]``, of the last
        logits_to_keep positions where that is not 0; labels ``[B, T]``, which are the ids
        themselves, -100 where they are ignored, since transformers' loss shifts them.

        skip_logits: whether the loss is made from hidden states, a chunk of logits at a time, and
        logits are None (`tidegate.ops.linear_cross_entropy`); None: in training, where the
        configuration's fuse_linear_cross_entropy says so and neither the head nor the loss is
        somebody's own.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            **{name: kwargs[name] for name in PACKED if name in kwargs},
        )
        x = outputs.last_hidden_state
        rest = {name: value for name, value in kwargs.items() if name not in PACKED}
        if self._skips_logits(skip_logits, labels, logits_to_keep):
            return CausalLMOutputWithPast(
                loss=self._loss_in_chunks(x, labels, **rest),
                hidden_states=outputs.hidden_states,
                **{_CACHE: getattr(outputs, _CACHE)},
            )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **rest
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{_CACHE: getattr(outputs, _CACHE)},
        )

    def _skips_logits(
        self, asked: bool | None, labels: Tensor | None, logits_to_keep: int | Tensor
    ) -> bool:
        if asked and labels is None:
            raise ValueError("TidegateForCausalLM: skip_logits: expected labels with it; got None")
        if asked is False or labels is None:
            return False
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        fits = (
            keeps_all
            and self.loss_function is ForCausalLMLoss
            and is_plain(self.lm_head, Linear, nn.Linear)
        )
        if asked and not fits:
            raise ValueError(
                "TidegateForCausalLM: skip_logits: expected None or False with logits_to_keep, a "
                "loss_function of your own, or a head that is adapted, sharded or has hooks; got "
                "True"
            )
        return fits and (asked or (self.training and self.config.fuse_linear_cross_entropy))

    def _loss_in_chunks(
        self,
        x: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """transformers' ForCausalLMLoss of the head's logits, with its arguments."""
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = ops.linear_cross_entropy(
            x.flatten(0, -2),
            self.lm_head.weight,
            shift_labels.flatten().to(x.device, torch.long),
            self.lm_head.bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """transformers' cache, with these layers in it before it is asked for its length."""
        found = super()._prepare_cache_for_generation(
            generation_config, model_kwargs, *args, **kwargs
        )
        if isinstance(model_kwargs.get(_CACHE), Cache):
            self.model.adopt(model_kwargs[_CACHE])
        return found

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *args: Any,
        inputs_embeds: Tensor | None = None,  # generate() looks for this name in the signature
        **kwargs: Any,
    ) -> dict[str, Any]:
        """transformers' inputs, without what costs a look at the device for nothing: positions,
        which say no more than the mask does, and the mask of a step, whose tokens are all new."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, *args, inputs_embeds=inputs_embeds, **kwargs
        )
        inputs.pop("position_ids", None)
        # By its old name, for which PEFT looks: without one, prompt tuning reads its virtual tokens
        # again before each token.
        inputs["past_key_values"] = inputs.pop(_CACHE, None)
        ids = inputs.get("input_ids")
        if ids is not None and ids.size(1) == 1 and not kwargs.get("is_first_iteration", False):
            inputs.pop("attention_mask", None)
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The mask as it is: nothing here takes one of four dimensions."""
        return attention_mask


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, as parameters, and what else a state dict holds."""
    return dict(model.state_dict(keep_vars=True))


def _their_name(name: str) -> str:
    """The name in `TidegateForCausalLM` of a CausalLM's tensor."""
    return "lm_head.weight" if name == "head.weight" else f"model.{name}"


class TidegateForSequenceClassification(TidegatePreTrainedModel):
    """Classifies sequences by the mean of their hidden states, padding left out, as
    `SequenceClassifier` does. num_labels, problem_type and the loss are transformers'."""

    def __init__(self, config: TidegateConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TidegateModel(config)
        weight = self.model.embedding.weight
        self.score = make_linear(config.dim, config.num_labels, True, weight.device, weight.dtype)
        reset_linear(self.score)
        self._finish()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """input_ids ``[B, T]`` -> logits ``[N, num_labels]``: of N = B rows, padded by
        attention_mask or, without one, by config.pad_token_id on either side, or of N packed
        sequences."""
        kwargs.pop("use_cache", None)
        _check_input("TidegateForSequenceClassification", input_ids, inputs_embeds)
        packing = packing_from(kwargs)
        given = input_ids if inputs_embeds is None else inputs_embeds[..., 0]
        tokens = lay_out(given[..., None], attention_mask, position_ids, **packing)
        # Where neither a mask nor bounds nor positions say what is real, pad_token_id does.
        if attention_mask is None and not tokens.packed and input_ids is not None:
            attention_mask = self._mask_of(input_ids)
            tokens = lay_out(given[..., None], attention_mask, position_ids, **packing)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            cu_seq_lens_q=packing["cu_seqlens"],
            seq_idx=packing["seq_idx"],
        )
        x = outputs.last_hidden_state
        if tokens.cu_seqlens is None:
            pooled = mean_over_time(x)
        else:
            pooled = mean_pool(tokens.take(x)[0], tokens.cu_seqlens)
        logits = self.score(pooled)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config
            )
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states
        )

    def _mask_of(self, input_ids: Tensor) -> Tensor | None:
        """1 from a row's first token that is no padding to its last."""
        pad = self.config.pad_token_id
        if pad is None:
            return None
        real = (input_ids != pad).long()
        return ((real.cumsum(1) > 0) & (real.flip(1).cumsum(1).flip(1) > 0)).long()


__all__ = [
    "TidegateForCausalLM",
    "TidegateForSequenceClassification",
    "TidegateModel",
    "TidegatePreTrainedModel",
]
