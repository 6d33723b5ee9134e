"""The training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from .._sharding import local, whole
from .batches import IGNORED, Batch, count_answers
from .captured import CapturedStep
from .checkpoint import RunFolder
from .checkpoint_content import optimizer_states, weights_problem
from .config import TrainConfig
from .distributed import ALONE, Group
from .errors import UserError
from .evaluate import Score
from .masters import clip_gradients
from .optim import set_rates
from .parallel import place
from .progress import Progress
from .runtime import autocast
from .sources import Source
from .task_corpus import TaskCorpus

if TYPE_CHECKING:
    from .initial import Initial
    from .sharded import Saver

LOG_EVERY = 10


@dataclass
class Position:
    """How far a run has come; part of every checkpoint.

    seconds: wall time spent training, validation left out, over all restarts.
    last_eval_seconds, last_checkpoint_seconds: what it was when they were due last.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    last_eval_seconds: float = 0.0
    last_checkpoint_seconds: float = 0.0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        """That of a checkpoint; what earlier versions wrote beside it is passed over."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def is_due(self, every: int, seconds: float, last: float) -> bool:
        """Whether something is that happens every so many steps, or, where `every` is 0, so many
        seconds of training after the `last` time (0: never)."""
        if every:
            return self.step % every == 0
        return seconds > 0 and self.seconds - last >= seconds


def non_finite(
    model: torch.nn.Module, agree: Callable[[torch.Tensor], torch.Tensor] = lambda found: found
) -> str | None:
    """The name of the first parameter that holds infinity or NaN, if one does; agree: makes what
    this process found of its parts what all processes found."""
    parameters = dict(model.named_parameters())
    if not parameters:
        return None
    found = [local(p.detach()).isfinite().all() for p in parameters.values()]
    finite = agree(torch.stack(found)).tolist()
    return next((name for name, fine in zip(parameters, finite, strict=True) if not fine), None)


class Trainer:
    """Trains a model on text or on a task and writes its run folder.

    model: called as ``model(ids, labels, ...)``, returning an object with logits, loss and state,
    as `tidegate.models.CausalLM` and `SequenceClassifier` do; over a task whose labels are aligned
    with positions it is called with ``return_logits=True``. config.precision must be resolved (not
    "auto"). group: the processes that train together, each of which has such an object and calls
    the same methods of it. initial: the weights to begin with; None = the model's own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        corpus: Source,
        config: TrainConfig,
        folder: RunFolder,
        group: Group = ALONE,
        initial: Initial | None = None,
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.folder = folder
        self.group = group
        self.device = group.device(config.device)
        self.placement = place(model, self.device, group)
        self.model = self.placement.model
        try:
            if initial is not None:
                initial.load_into(self.model)
            config.prepare(self.model)
        except UserError as error:  # every process finds it
            raise group.error(error) from error
        if config.compile:
            for block in self.model.blocks:
                block.compile()
            norm = self.model.norm  # of a class of torch's, whose compile() does nothing
            norm.forward = torch.compile(norm.forward)
        self._reseed(0)
        alone = group.mode == "none"
        self._captures = config.cuda_graph and self.device.type == "cuda" and alone
        self.optimizer = config.make_optimizer(self.model, capturable=self._captures)
        self.placement.connect()
        # A step's work on the device, replayed from a graph or launched kernel by kernel.
        update = self._update_by
        self._update = CapturedStep(update, self.device) if self._captures else update
        self.schedule = config.learning_rate()
        self.sampler = corpus.sampler(config.batch_size, config.context, config.seed, self.device)
        self.sampler.take_share(group.rank, group.size)
        self._saver = None if alone else self._make_saver()
        self.position = Position()
        self.loss = math.nan  # of the last logged steps
        self.valid: Score | None = None
        self._given: tuple[str, ...] = ()  # which tensors a batch has
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._answers: list[torch.Tensor] = []  # right and asked, of tasks
        self._asked_to_stop = self._stop = False  # this process, and all by agreement

    def _make_saver(self) -> Saver:
        from .sharded import Saver

        return Saver(self.folder.path, self.group, self.device, self.folder.prune)

    def progress(self) -> float:
        """The part of the run that is done, in [0, 1]."""
        done = 0.0
        if self.config.steps is not None:
            done = self.position.step / self.config.steps
        if self.config.seconds is not None:
            done = max(done, self.position.seconds / self.config.seconds)
        return min(1.0, done)

    def run(self, quiet: bool = False) -> bool:
        """Trains to the end; False when SIGINT or SIGTERM asked to stop before it.

        Either way a checkpoint of the last step is on disk when this returns.
        """
        self.model.train()
        watched = self.group.watch(lambda: f"at step {self.position.step}")
        shown = Progress(self, quiet or not self.group.leads)
        with watched, _StopOnSignal(self), shown as progress:
            if self._saver is not None and self.progress() < 1.0:
                self._saver.prepare(self.model.state_dict(), self.optimizer, self._generators())
            while self.progress() < 1.0 and not self._stop:
                start = time.perf_counter()
                self._step()
                if self.position.step % LOG_EVERY == 0 and self.device.type == "cuda":
                    self.group.meet()
                    torch.cuda.synchronize(self.device)  # steps that only wait in line have no time
                seconds = self.position.seconds + time.perf_counter() - start
                self._stop, self.position.seconds = self.group.agree(self._asked_to_stop, seconds)
                if self.position.step % LOG_EVERY == 0:
                    self._log()
                progress.update()
                done = self.progress() >= 1.0
                if not done and self._eval_is_due():
                    self.validate(self.config.eval_tokens)
                    progress.report()
                if done or self._stop or self._checkpoint_is_due():
                    self.save(wait=done or self._stop)
        return not self._stop

    def stop(self) -> None:
        """Ends run() after the current step, in all processes."""
        self._asked_to_stop = True

    def _step(self) -> None:
        """One optimiser step; its loss stays on the device until it is logged."""
        position = self.position
        set_rates(self.optimizer, self.schedule(position.step, self.progress()))
        batch = self.sampler.next()
        if self._captures and batch.lengths is not None:
            raise UserError(
                f"train: cuda-graph: expected sequences of one length, got {self.corpus.name}, "
                "whose lengths differ; leave it out"
            )
        given = {name: t for name, t in batch._asdict().items() if t is not None}
        self._given = tuple(given)
        loss, norm, answers = self._update(*given.values())
        self._losses.append(loss)
        self._norms.append(norm)
        if isinstance(self.corpus, TaskCorpus):
            self._answers.append(answers)
        position.step += 1
        position.tokens += self.sampler.batch_tokens

    def _update_by(self, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Updates the weights by the batch of the given tensors: its loss, the gradient's norm, and
        how many answers were right and asked for (zeros where the data is text). This is what a
        CUDA graph replays."""
        config = self.config
        loss = torch.zeros((), device=self.device)
        answers = torch.zeros(2, dtype=torch.int64, device=self.device)
        is_task = isinstance(self.corpus, TaskCorpus)
        batch = Batch(**dict(zip(self._given, given, strict=True)))
        shares = batch.chunk(config.grad_accum)
        divisors = self._divisors(shares)
        for number, (share, divisor) in enumerate(zip(shares, divisors, strict=True), 1):
            with self.placement.reducing(number == len(shares)):
                with autocast(self.device, config.precision):
                    output, labels = share.run(
                        self.placement.call, self.device, logits=is_task, **config.loss_options()
                    )
                share_loss = output.loss / divisor
                share_loss.backward()
            loss += share_loss.detach()
            if is_task:
                answers += count_answers(output.logits.detach(), labels)
        largest = config.clip if config.clip > 0 else math.inf
        norm = whole(clip_gradients(self.optimizer, self.model, largest))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm, answers

    def _divisors(self, shares: list[Batch]) -> list[float] | torch.Tensor:
        """What the losses of a batch's parts, means over what each asks for, are divided by so that
        their sum, averaged over the processes, is the mean over all that the batch asks for."""
        if not isinstance(self.corpus, TaskCorpus) and shares[0].cu_seqlens is None:
            return [len(shares)] * len(shares)  # every position of every part is asked
        asked = [(share.labels != IGNORED).sum() for share in shares]
        asked = torch.stack(asked).to(self.device)
        total = self.group.sum(asked.sum())
        return total / (asked * self.group.size).clamp(min=1)

    def _eval_is_due(self) -> bool:
        """Whether a validation is due after this step."""
        config, now = self.config, self.position
        due = now.is_due(config.eval_every, config.eval_seconds, now.last_eval_seconds)
        if due:
            now.last_eval_seconds = now.seconds
        return due

    def _checkpoint_is_due(self) -> bool:
        """Whether a checkpoint is due after this step."""
        config, now = self.config, self.position
        last = now.last_checkpoint_seconds
        due = now.is_due(config.checkpoint_every, config.checkpoint_seconds, last)
        if due:
            now.last_checkpoint_seconds = now.seconds
        return due

    def _log(self) -> None:
        """Writes the mean loss of the steps since the last line."""
        if not self._losses:
            return
        losses = self.group.sum(torch.stack(self._losses)) / self.group.size
        loss = losses.mean().item()
        norm = torch.stack(self._norms).mean().item()
        accuracy = {}
        if self._answers:
            right, asked = self.group.sum(torch.stack(self._answers).sum(dim=0)).tolist()
            accuracy["accuracy"] = right / asked
        for kept in (self._losses, self._norms, self._answers):
            kept.clear()
        if not math.isfinite(loss):
            self._refuse(
                f"train: the loss is {loss} at step {self.position.step}: lower --lr or clip the "
                "gradient with --clip; the last checkpoint is untouched"
            )
        if not math.isfinite(norm):
            self._refuse(
                f"train: the gradient's norm is {norm} at step {self.position.step}: lower --lr; "
                "the last checkpoint is untouched"
            )
        self.loss = loss
        position = self.position
        self._append_metrics(
            {
                "kind": "train",
                "step": position.step,
                "tokens": position.tokens,
                "seconds": round(position.seconds, 3),
                "loss": loss,
                **accuracy,
                "lr": float(self.optimizer.param_groups[-1]["lr"]),
                "grad_norm": norm,
                "tokens_per_second": round(position.tokens / max(position.seconds, 1e-9), 1),
            }
        )

    def validate(self, limit: int | None = None) -> Score:
        """Scores the validation split (about `limit` tokens of it) and writes the result.

        Raises:
            UserError: a weight is not finite.
        """
        self._log()
        self._refuse_non_finite()
        config = self.config
        with torch.compiler.set_stance("force_eager"):  # its shapes are not those of training
            score = self.corpus.score(
                self.model,
                self.device,
                config.precision,
                limit,
                trained=config.context,
                group=self.group,
            )
        position = self.position
        self._append_metrics(
            {
                "kind": "valid" if limit is not None else "final",
                "step": position.step,
                "tokens": position.tokens,
                "seconds": round(position.seconds, 3),
                "loss": score.nats,
                "perplexity": score.perplexity if math.isfinite(score.perplexity) else None,
                "bits_per_byte": score.bits_per_byte,
                **({} if score.accuracy is None else {"accuracy": score.accuracy}),
                "valid_tokens": score.tokens,
            }
        )
        self.valid = score
        return score

    def save(self, wait: bool = True) -> None:
        """Writes a checkpoint of this moment; several processes do so beside the training that goes
        on, unless they are to wait.

        Raises:
            UserError: a weight is not finite; the checkpoint before is untouched.
        """
        self._log()
        self._refuse_non_finite()
        content = {
            "position": dict(vars(self.position)),
            "samples": self.sampler.position,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self._generators(),
            "metrics_size": self.folder.metrics_size(),
            "fingerprint": self.corpus.fingerprint,
        }
        if self._saver is None:
            self.folder.save(content)
            return
        self._saver.save(content)
        if wait:
            self._saver.wait()

    def _generators(self) -> dict[str, torch.Tensor]:
        """The states of torch's generators."""
        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def _reseed(self, step: int) -> None:
        """Seeds dropout anew in every process but the first, which draws what one alone would."""
        if self.group.rank > 0:
            mixed = np.random.SeedSequence([self.config.seed, self.group.rank, step])
            torch.manual_seed(int(mixed.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def _append_metrics(self, values: dict[str, Any]) -> None:
        if self.group.leads:
            self.folder.append_metrics(values)

    def _refuse(self, problem: str) -> NoReturn:
        """Raises what all processes find."""
        raise self.group.error(UserError(problem))

    def _refuse_non_finite(self) -> None:
        if name := non_finite(self.model, self.placement.all_finite):
            self._refuse(
                f"train: {name} holds numbers that are not finite at step {self.position.step}: "
                "lower --lr or clip the gradient with --clip; the last checkpoint is untouched"
            )

    def restore(self, content: dict[str, Any], path: Path | None = None) -> None:
        """Goes on from what save() wrote. path: where it lay, for errors.

        Raises:
            UserError: the checkpoint is of another model or of other data; nothing was changed.
        """
        path = self.folder.checkpoint if path is None else path
        if content["fingerprint"] != self.corpus.fingerprint:
            raise UserError(
                f"{path}: the checkpoint was trained on other data than {self.corpus.name} now "
                "holds; name another --out"
            )
        position = Position.from_dict(content["position"])
        try:
            if problem := weights_problem(self.model, content["model"]):
                raise ValueError(problem)
            states = optimizer_states(self.optimizer, content["optimizer"], position.step > 0)
            content = self.placement.share_of_state({**content, "optimizer": states})
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
            self._restore_generators(content["rng"], position.step)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            detail = str(error).splitlines()[-1].strip()
            raise UserError(f"{path}: the checkpoint is of another model: {detail}") from error
        self.position = position
        self.sampler.position = content["samples"]
        if self.group.leads:
            self.folder.cut_metrics(content["metrics_size"])

    def _restore_generators(self, states: dict[str, torch.Tensor] | None, step: int) -> None:
        """Sets torch's generators; those of a device that is not there now are left out. None: of
        this process there are none."""
        if states is None:
            self._reseed(step)
            return
        torch.set_rng_state(states["cpu"].cpu())
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"].cpu(), self.device)


class _StopOnSignal:
    """Turns the first SIGINT or SIGTERM into a checkpoint; the second one ends the process."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> _StopOnSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._earlier[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread: signals stay as they are
                break
        return self

    def _handle(self, number: int, _frame: Any) -> None:
        self._trainer.stop()
        with contextlib.suppress(RuntimeError, OSError):  # a print() may be what was interrupted
            if self._trainer.group.leads:
                print("\nstopping after this step ...", file=sys.stderr)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier.clear()

    def __exit__(self, *_: object) -> None:
        self._restore()
