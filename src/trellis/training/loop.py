"""The training loop."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .. import __version__, machine
from ..data.batches import Batch, Batches
from ..data.shards import Corpus
from ..mixers import Mixer
from ..models.modeling import TrellisForCausalLM
from ..models.presets import state_bytes, training_flops
from . import checkpoint as checkpoints
from .distillation import Teacher, add_low_rank, freeze_all_but_mixers, load_pretrained, said
from .distributed import Processes, reduce_gradients, reshard, spread, synchronised, whole
from .estimate import memory_of
from .metrics import Metrics, ProgressLine, perplexity_text, validate
from .optimization import build_optimizer, context_at, diagnose, learning_rate, not_finite_outputs
from .recipe import Recipe
from .relay import ProcessRelay, StepRelay, gathered, restored

#: The machine's peak is the best of some products of square matrices of this size.
PEAK_SIZES = {"cpu": 2048, "cuda": 8192}
PEAK_ROUNDS = 10


class TrainingStopped(RuntimeError):
    """The run cannot go on; the newest checkpoint is intact.

    exit_code: what a command that trains exits with.
    """

    exit_code = 1


class Diverged(TrainingStopped):
    """Steps were not finite: too many in a row to go on, or the last ones of the run."""


class Interrupted(TrainingStopped):
    """A signal stopped the run after a step, which was saved; 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, text: str, number: int):
        super().__init__(text)
        self.exit_code = 128 + number


class Trainer:
    """Trains one run, a new one or a resumed one.

    A step depends only on the recipe, the text and the checkpoint that the run was resumed from.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: Path,
        corpus: Corpus,
        validation: Any,
        group: Processes,
        resumed: checkpoints.Checkpoint | None,
    ):
        self.recipe, self.run_folder, self.group = recipe, run, group
        self.corpus, self.validation = corpus, validation
        self.batches = make_batches(recipe, corpus)
        torch.manual_seed(recipe.train.seed)
        self.model = build_model(recipe, corpus)
        self.teacher = _teacher(recipe, corpus, self.model, group)
        if recipe.train.lora:
            add_low_rank(self.model, recipe.train.lora)
        self.model = self.model.to(group.device)
        #: The structure of every layer's state, asked for before weights are sharded.
        self.templates = self.model.init_cache(1).states
        if recipe.train.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if recipe.train.compile:
            for block in self.model.model.layers:
                block.compile()
        self.model.train()
        self._flops_per_token = training_flops(self.model, recipe.data.context)
        self.called = spread(self.model, recipe, group)
        sharded = group.world > 1 and recipe.train.strategy == "fsdp"
        fused = group.device.type == "cuda" or (group.device.type == "cpu" and not sharded)
        self.optimizer = build_optimizer(self.model, recipe.train, fused)
        self.autocast = recipe.train.precision == "bf16" or (
            recipe.train.precision == "auto" and group.device.type == "cuda"
        )

        self.micro = group.micro_rows(recipe)
        #: For each micro-batch, the states of all layers that the relay hands to the next step.
        self.relayed: list[list[Any] | None] = [None] * len(self.micro)
        self.step = 0
        self.updates = 0  # steps that were not skipped
        self.bad_steps = 0  # steps that were skipped: their loss or gradient was not finite
        self.bad_in_a_row = 0
        self.interval_loss, self.interval_steps = 0.0, 0
        if resumed is not None:
            self._load(resumed)

    # The run.

    def run(self) -> TrainingStopped | None:
        """Train to the last step, or until a signal asks to stop.

        Returns Interrupted after a signal, Diverged if the last steps were skipped, else None: the
        caller has to let go of the trainer before it raises.

        Raises:
            TrainingStopped: too many steps in a row were not finite, or a file cannot be written.
        """
        recipe, group = self.recipe, self.group
        line = ProgressLine(recipe.steps, of_text=recipe.distill.loss == "text")
        say = line.say if group.first else (lambda text: None)
        peak = self._peak()
        self._introduce(say, peak)
        metrics = None
        with _stop_signals() as stopping:
            try:
                group.on_first(lambda: checkpoints.clean(self.run_folder))
                if group.first:
                    metrics = Metrics(self.run_folder, self.step, recipe.log.tensorboard)
                seconds, tokens = 0.0, 0
                while self.step < recipe.steps:
                    start = time.perf_counter()
                    measured = self._train_step(stopping)
                    seconds += time.perf_counter() - start
                    tokens += recipe.rows * recipe.data.context
                    last = self.step == recipe.steps
                    if self.step % recipe.log.every == 0 or last or self.step == 1:
                        record = self._record(measured, seconds, tokens, peak)
                        if metrics is not None:
                            metrics.write(record)
                            line.show(record)
                        seconds, tokens = 0.0, 0
                    if last or _due(self.step, recipe.log.validate_every):
                        self._validate(metrics, say)
                    # While steps are skipped, a checkpoint would only push out a better one.
                    due = _due(self.step, recipe.checkpoint.every) and not self.bad_in_a_row
                    if last or due or measured["signal"]:
                        self.save()
                    if measured["signal"] and not last:
                        text = (
                            f"stopped after step {self.step}, saved; go on with: "
                            f"trellis train {self.run_folder} --resume"
                        )
                        say(text)
                        return Interrupted(text, measured["signal"])
            except OSError as error:
                raise TrainingStopped(
                    f"stopped at step {self.step}: {error}. {self._newest()}"
                ) from error
            finally:
                if metrics is not None:
                    with contextlib.suppress(OSError):  # that the disk is full was reported above
                        metrics.close()
        if self.bad_in_a_row:
            return Diverged(
                f"{self.run_folder} has done its {self.step} steps, but the last "
                f"{self.bad_in_a_row} of them were skipped: their loss or gradient was not finite, "
                "so the model is probably useless. A lower train.learning_rate may help"
            )
        skipped = f"; {self.bad_steps} of {self.step} steps were skipped" if self.bad_steps else ""
        say(f"finished: {self.run_folder}{skipped}")
        if recipe.distill.teacher is None:
            say(f'next: trellis generate {self.run_folder} --prompt "...", or trellis eval --help')
        return None

    def dry_run(self, steps: int = 3) -> dict[str, Any]:
        """What the run will take, by a few measured steps with one micro-batch each.

        Nothing is written. The weights change: the trainer must not run afterwards.
        """
        recipe, parts = self.recipe, len(self.micro)
        self.micro, self.relayed = self.micro[:1], self.relayed[:1]
        times = []
        for _ in range(1 + steps):  # the first one is slower
            start = time.perf_counter()
            self._train_step([])
            times.append(time.perf_counter() - start)
        seconds = parts * statistics.median(times[1:])
        tokens = recipe.rows * recipe.data.context
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "state_bytes": state_bytes(self.model.config, recipe.data.context),
            "memory_bytes": self._memory(),
            "available_bytes": memory_of(self.group.device),
            "steps": recipe.steps,
            "tokens": recipe.steps * tokens,
            "epochs": recipe.steps / self.batches.steps_per_epoch,
            "seconds": (recipe.steps - self.step) * seconds,
            "tokens_per_second": tokens / seconds,
        }

    def _introduce(self, say: Any, peak: float) -> None:
        recipe = self.recipe
        count = sum(p.numel() for p in self.model.parameters())
        if self.validation is None:
            say("there is no validation: the text was prepared without a validation part")
        mixers = ", ".join(dict.fromkeys(name for name, _ in self.model.config.layer_mixers()))
        say(
            f"{mixers}: {count:,} parameters; {self.corpus.train.tokens:,} tokens of "
            f"text; {recipe.steps} steps of {recipe.rows} x {recipe.data.context} tokens "
            f"({recipe.steps / self.batches.steps_per_epoch:.2f} epochs)"
        )
        whose = "allocated on the GPU" if self.group.device.type == "cuda" else "of this process"
        say(
            f"below, % of peak is of {peak / 1e9:,.0f} GFLOP/s, the speed of large matrix products "
            f"here; GiB is the memory {whose}"
        )
        if self.step:
            say(f"resumed after step {self.step}")

    def _peak(self) -> float:
        """Operations per second of large matrix products, measured now, over all processes."""
        size = PEAK_SIZES.get(self.group.device.type, 2048)
        dtype = torch.bfloat16 if self.autocast else torch.float32
        self.group.barrier()
        rate = machine.gemm_rate(size, PEAK_ROUNDS, self.group.device, dtype)
        return 2 * float(self.group.summed(torch.tensor(rate, dtype=torch.float64)))

    # A step.

    def _train_step(self, stopping: list[int]) -> dict[str, Any]:
        """Updates the weights once, or skips the step if its loss or gradient is not finite.

        stopping: the signals that have come since the run began, in any process.
        """
        recipe, group, step = self.recipe, self.group, self.step
        rate = learning_rate(recipe, step)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        loss = torch.zeros((), dtype=torch.float64)
        relayed: list[list[Any] | None] = []
        for number in range(len(self.micro)):
            batch = self._batch(step, number)
            with synchronised(self.called, last=number == len(self.micro) - 1):
                part, states = self._forward(batch, self.relayed[number])
                part.backward()
            loss += part.detach().cpu().double() / group.world
            relayed.append(states)
        reduce_gradients(self.model, group)
        asked = torch.tensor([s in stopping for s in STOP_SIGNALS], dtype=torch.float64)
        loss, *counts = group.summed(torch.cat([loss[None], asked])).tolist()
        trained = [p for p in self.model.parameters() if p.grad is not None]
        norm = whole(get_total_norm([p.grad for p in trained]))
        self.step += 1
        if math.isfinite(loss) and norm.isfinite():
            if recipe.train.clip:
                clip_grads_with_norm_(trained, recipe.train.clip, norm)
            self.optimizer.step()
            self.updates += 1
            self.bad_in_a_row = 0
            self.interval_loss += loss
            self.interval_steps += 1
            self.relayed = relayed
        else:
            self._skip(loss, float(norm))
        self.optimizer.zero_grad()
        stop = next((s for s, count in zip(STOP_SIGNALS, counts) if count), None)
        return {"grad_norm": float(norm), "learning_rate": rate, "signal": stop}

    def _batch(self, step: int, number: int) -> Batch:
        context = context_at(self.recipe, step)
        cut = context if context < self.recipe.data.context else None
        return self.batches.batch(step, self.micro[number], self.group.part, cut).to(
            self.group.device
        )

    def _forward(self, batch: Batch, states: list[Any] | None) -> tuple[Tensor, list[Any] | None]:
        """The loss of a micro-batch, and the states that the relay hands to the next step.

        The loss is scaled so that the mean over processes of their summed losses is the mean over
        the global batch.
        """
        relay: StepRelay | ProcessRelay | None = None
        if self.group.sequence_parallel > 1:
            relay = ProcessRelay(self.group, batch, self.templates)
        elif self.recipe.data.batches == "contiguous":
            relay = StepRelay(states, batch)
        if self.teacher is not None and self.recipe.distill.loss != "text":
            with self._autocast():
                return self._distillation_loss(batch), None
        with self._autocast():
            loss = self.called(
                **batch.model_inputs(),
                relay=relay,
                num_items_in_batch=batch.predicted / self.group.world,
                logits_to_keep=1,
                use_cache=False,
            ).loss
        return loss, relay.states if isinstance(relay, StepRelay) else None

    def _distillation_loss(self, batch: Batch) -> Tensor:
        """What is learnt from the teacher. Several micro-batches count by their shares."""
        assert self.teacher is not None
        if self.recipe.distill.loss == "logits":
            return self.teacher.divergence(self.called, batch)[0] / batch.predicted
        errors = self.teacher.mixer_errors(self.model, batch)
        return torch.stack(list(errors.values())).mean() / len(self.micro)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.group.device.type, torch.bfloat16, enabled=self.autocast)

    def _skip(self, loss: float, norm: float) -> None:
        """Count a bad step and drop the relayed states, perhaps its cause; stop after too many."""
        self.bad_steps += 1
        self.bad_in_a_row += 1
        relayed, self.relayed = self.relayed, [None] * len(self.micro)
        if self.bad_in_a_row < self.recipe.train.max_bad_steps:
            return
        with torch.no_grad(), not_finite_outputs(self.model) as outputs:
            for number in range(len(self.micro)):
                self._forward(self._batch(self.step - 1, number), relayed[number])
        cause = diagnose(self.model, outputs, self.group.union)
        raise Diverged(
            f"{self.bad_in_a_row} steps in a row gave a loss or gradient that is not finite (step "
            f"{self.step}: loss {loss}, gradient norm {norm}): {cause}. {self._newest()}"
        )

    # Records and checkpoints.

    def _record(
        self, measured: dict[str, Any], seconds: float, tokens: int, peak: float
    ) -> dict[str, Any]:
        # None if every step since the last record was skipped.
        loss = self.interval_loss / self.interval_steps if self.interval_steps else None
        self.interval_loss, self.interval_steps = 0.0, 0
        rate = tokens / seconds
        left = (self.recipe.steps - self.step) * self.recipe.rows * self.recipe.data.context
        return {
            "step": self.step,
            "tokens": self.step * self.recipe.rows * self.recipe.data.context,
            "loss": loss,
            "grad_norm": norm if math.isfinite(norm := measured["grad_norm"]) else None,
            "learning_rate": measured["learning_rate"],
            "context": context_at(self.recipe, self.step - 1),
            "bad_steps": self.bad_steps,
            "timing": {
                "time": time.time(),
                "tokens_per_second": rate,
                "utilisation": self._flops_per_token * rate / peak,
                "memory_bytes": self._memory(),
                "seconds_left": left / rate,
            },
        }

    def _memory(self) -> int:
        """Bytes that the run holds: of a GPU the most so far, else of this process now."""
        if self.group.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return machine.resident_bytes()

    def _validate(self, metrics: Metrics | None, say: Any) -> None:
        if self.validation is None:
            return
        recipe = self.recipe
        rows = max(1, recipe.train.micro_tokens // recipe.data.context)
        with self._autocast():
            found = validate(
                self.called, self.validation, recipe.data.context, recipe.log.validation_tokens,
                rows, self.group,
            )  # fmt: skip
            if self.teacher is not None:
                found |= self.teacher.compare(
                    self.model, self.validation, recipe.data.context, recipe.log.validation_tokens,
                    rows, mixers=recipe.distill.loss == "mixers",
                )  # fmt: skip
        reshard(self.model)
        if metrics is not None:
            metrics.write({"step": self.step, **found})
        loss = found["validation_loss"]
        say(
            f"step {self.step}: validation loss {loss:.4f}, perplexity {perplexity_text(loss)}, "
            f"{found['validation_bits_per_byte']:.3f} bits per byte"
            + (said(found) if self.teacher is not None else "")
        )

    def save(self) -> None:
        """Write a checkpoint of the present step. Every process must call it."""
        extra = {"rng.cpu": torch.get_rng_state()}
        if self.group.device.type == "cuda":
            extra["rng.cuda"] = torch.cuda.get_rng_state(self.group.device)
        extra.update(gathered(self.relayed, self.group))
        checkpoints.save(
            self.run_folder,
            self.step,
            checkpoints.training_tensors(self.model, self.optimizer),
            extra,
            self.model.config.to_dict(),
            {
                "updates": self.updates,
                "bad_steps": self.bad_steps,
                "bad_in_a_row": self.bad_in_a_row,
                "interval": [self.interval_loss, self.interval_steps],
                "recipe": self.recipe.as_dict(),
                "data": self.corpus.fingerprint,
                "versions": {
                    "trellis": __version__,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "python": platform.python_version(),
                },
            },
            self.recipe.checkpoint.keep + (self.bad_in_a_row > 0),
            self.group,
        )

    def _load(self, resumed: checkpoints.Checkpoint) -> None:
        content = resumed.content
        checkpoints.load_tensors(resumed, checkpoints.training_tensors(self.model, self.optimizer))
        self.step, self.updates = resumed.step, content["updates"]
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["step"].fill_(self.updates)
        self.bad_steps, self.bad_in_a_row = content["bad_steps"], content["bad_in_a_row"]
        self.interval_loss, self.interval_steps = content["interval"]
        extra = checkpoints.load_extra(resumed)
        torch.set_rng_state(extra["rng.cpu"])
        if self.group.device.type == "cuda" and "rng.cuda" in extra:
            torch.cuda.set_rng_state(extra["rng.cuda"], self.group.device)
        self.relayed = restored(extra, self.micro, self.templates, self.group.device)

    def _newest(self) -> str:
        """A sentence about the newest checkpoint, to end an error with."""
        steps = checkpoints.steps_in(self.run_folder)
        if not steps:
            return "There is no checkpoint yet."
        return f"The newest checkpoint, of step {steps[-1]}, is whole."


def build_model(recipe: Recipe, corpus: Corpus) -> TrellisForCausalLM:
    """A new model by the recipe, for the vocabulary of the corpus."""
    if recipe.model.start is not None:
        model = load_pretrained(recipe.model.start, corpus)
    else:
        end = corpus.manifest["tokenizer"]["end_of_document"]
        model = TrellisForCausalLM(recipe.model.config(corpus.vocab_size, eos_token_id=end))
    if recipe.data.batches == "contiguous":
        for name, module in model.named_modules():
            if isinstance(module, Mixer) and math.isinf(module.state_size()):
                raise ValueError(
                    f'data.batches = "contiguous" never lets a state start afresh, but that of '
                    f"{name} grows with what is read: give it a window, or use packed batches"
                )
    return model


def _teacher(
    recipe: Recipe, corpus: Corpus, student: TrellisForCausalLM, group: Processes
) -> Teacher | None:
    """The teacher of a recipe, if it has one; freezes the weights that are not to be trained."""
    distill = recipe.distill
    if distill.teacher is None:
        return None
    if group.world > 1:
        raise ValueError(f"distill.teacher needs one process; got {group.world}")
    teacher = Teacher(distill.teacher, corpus, group.device)
    teacher.check(student)
    if distill.loss == "mixers":
        layers = teacher.different(student)
        if not layers:
            raise ValueError(
                'distill.loss = "mixers" needs a model with other mixers than distill.teacher, '
                f"{distill.teacher}; all layers have the same"
            )
        freeze_all_but_mixers(student, layers)
    return teacher


def make_batches(recipe: Recipe, corpus: Corpus) -> Batches:
    return Batches(
        corpus.train,
        kind=recipe.data.batches,
        context=recipe.data.context,
        rows=recipe.rows,
        seed=recipe.train.seed,
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


#: Signals that stop a run after the present step.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and Ctrl-C in a list; a second Ctrl-C interrupts at once.

    Under torchrun a second one does not: torchrun repeats the Ctrl-C that the terminal has sent.
    """
    noted: list[int] = []
    launched = "TORCHELASTIC_RUN_ID" in os.environ

    def note(number: int, frame: Any) -> None:
        if noted and number == signal.SIGINT and not launched:
            raise KeyboardInterrupt
        noted.append(number)

    before: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # only the main thread may handle signals
        before = {s: signal.signal(s, note) for s in STOP_SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
