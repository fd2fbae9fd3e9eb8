"""Trains GPT-2 on real text in half the memory, and shows what that costs.

The model is written as it always is, but for `@jdelta.remat` on its block. `jdelta.plan` fits the
training step into `--budget`. Then the planned step and the plain one train in turns, on the same
seeds, so that what else the machine does slows both alike. The text is the source code of Python's
own library, read byte by byte. On two cores all of it takes one to two minutes.

    python examples/gpt2.py
    python examples/gpt2.py --model gpt2-xl --batch 32 --budget 48GiB \
        --target tpu:v5p:2x2x1 --compile-only
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import statistics
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jdelta

CORPUS_BYTES = 8_000_000
SEED = 0
TOLERANCE = {jnp.float32: 1e-4, jnp.bfloat16: 1e-2}
"""Largest accepted relative difference of losses: rounding differs, and training amplifies it."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A GPT-2.

    Attributes:
        layers: Number of blocks.
        width: Width of the residual stream.
        heads: Attention heads.
        rate: Peak learning rate.
        vocab: Size of the vocabulary, of which the text uses 256.
        positions: Longest sequence.
        batch: Usual number of sequences in a batch.
        dtype: Type to compute in; parameters are float32.
        dropout: Dropout rate.
        scan: Whether one block is scanned over stacked parameters.
    """

    layers: int
    width: int
    heads: int
    rate: float
    vocab: int = 50257
    positions: int = 1024
    batch: int = 8
    dtype: Any = jnp.bfloat16
    dropout: float = 0.1
    scan: bool = True


CONFIGS = {
    "nano": Config(4, 128, 4, 1e-3, vocab=256, positions=128, batch=16, dtype=jnp.float32),
    "gpt2": Config(12, 768, 12, 6e-4),
    "gpt2-medium": Config(24, 1024, 16, 3e-4),
    "gpt2-large": Config(36, 1280, 20, 2.5e-4),
    "gpt2-xl": Config(48, 1600, 25, 2e-4),
}


class Attention(nn.Module):
    """Causal self-attention."""

    config: Config

    @nn.compact
    def __call__(self, x):
        """Mixes positions of `x`, `[batch, length, width]`."""
        c = self.config
        batch, length, width = x.shape
        qkv = nn.Dense(3 * width, dtype=c.dtype, name="qkv")(x)
        q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, c.heads, -1), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // c.heads) ** -0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(c.dtype).min))
        weights = nn.Dropout(c.dropout, deterministic=False, name="drop")(weights)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        return nn.Dense(width, dtype=c.dtype, name="proj")(mixed)


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    config: Config

    @nn.compact
    def __call__(self, x):
        """Transforms every position of `x`, `[batch, length, width]`."""
        dense = functools.partial(nn.Dense, dtype=self.config.dtype)
        hidden = nn.gelu(dense(4 * self.config.width, name="ff1")(x))
        return dense(self.config.width, name="ff2")(hidden)


@jdelta.remat
class Block(nn.Module):
    """One pre-norm block; the decorator lets a plan decide what of it is kept in memory."""

    config: Config

    @nn.compact
    def __call__(self, x):
        """Adds both branches to the residual stream `x`, `[batch, length, width]`."""
        c = self.config
        drop = functools.partial(nn.Dropout, c.dropout, deterministic=False)
        norm = functools.partial(nn.LayerNorm, dtype=c.dtype)
        x = x + drop(name="drop_1")(Attention(c, name="attn")(norm(name="ln_1")(x)))
        return x + drop(name="drop_2")(MLP(c, name="mlp")(norm(name="ln_2")(x)))


class GPT2(nn.Module):
    """Tokens `[batch, length]` to float32 logits `[batch, length, vocab]`."""

    config: Config

    @nn.compact
    def __call__(self, tokens):
        """Scores the next token at every position."""
        c = self.config
        embed = functools.partial(nn.Embed, features=c.width, dtype=c.dtype)
        wte = embed(c.vocab, embedding_init=nn.initializers.normal(0.02), name="wte")
        wpe = embed(c.positions, embedding_init=nn.initializers.normal(0.01), name="wpe")
        x = wte(tokens) + wpe(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(c.dropout, deterministic=False, name="drop")(x)
        x = self._scanned(x) if c.scan else self._unrolled(x)
        x = nn.LayerNorm(dtype=c.dtype, name="ln_f")(x)
        return wte.attend(x).astype(jnp.float32)

    def _unrolled(self, x):
        for i in range(self.config.layers):
            x = Block(self.config, name=f"h_{i}")(x)
        return x

    def _scanned(self, x):
        scan = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.config.layers,
        )
        return scan(Block(self.config, name="h"), x, None)[0]


class State(NamedTuple):
    """What one training step hands to the next.

    Attributes:
        step: Steps done so far, int32 scalar.
        params: Parameters of the model.
        opt: State of the optimiser.
    """

    step: jax.Array
    params: Any
    opt: optax.OptState


Step = Callable[[State, jax.Array], tuple[State, dict[str, jax.Array]]]


def make_training(config: Config, steps: int) -> tuple[Callable[[], State], Step]:
    """The functions that make the first state, and each state from the one before."""
    model = GPT2(config)
    rate = optax.warmup_cosine_decay_schedule(0.0, config.rate, steps // 10, steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=matrices),
    )

    def init() -> State:
        key = jax.random.key(SEED)
        tokens = jnp.zeros((1, config.positions), jnp.int32)
        params = model.init({"params": key, "dropout": key}, tokens)["params"]
        return State(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    def loss_fn(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state: State, tokens: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(SEED), state.step)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens, key)
        updates, opt = optimizer.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, opt), {"loss": loss}

    return init, step


def matrices(params: Any) -> Any:
    """Marks the parameters that weight decay applies to: no biases, no scales."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in {"kernel", "embedding"}, params
    )


def read_corpus() -> np.ndarray:
    """The source code of Python's standard library as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:CORPUS_BYTES]
    return np.frombuffer(text, np.uint8)


def batches(corpus: np.ndarray, batch: int, length: int) -> Iterator[np.ndarray]:
    """Endless random windows of the text, `[batch, length + 1]`, the same on every call."""
    rng = np.random.default_rng(SEED)
    windows = np.lib.stride_tricks.sliding_window_view(corpus, length + 1)
    while True:
        yield windows[rng.integers(len(windows), size=batch)].astype(np.int32)


@dataclasses.dataclass
class Run:
    """A training run.

    Attributes:
        step: The compiled training step, which may take over the state's memory.
        state: Where it is.
        losses: Loss of every step.
        durations: Seconds of every step.
        resident: The most by which a step raised the process's resident memory, bytes.
    """

    step: Step
    state: State
    losses: list[float] = dataclasses.field(default_factory=list)
    durations: list[float] = dataclasses.field(default_factory=list)
    resident: int = 0

    @property
    def seconds(self) -> float:
        """Median duration of a step."""
        return statistics.median(self.durations)

    def go_on(self, tokens: np.ndarray) -> None:
        """One step more."""
        before = resident_memory()
        with contextlib.closing(ResidentPeak()) as peak:
            start = time.perf_counter()
            self.state, metrics = self.step(self.state, tokens)
            self.losses.append(float(metrics["loss"]))
            self.durations.append(time.perf_counter() - start)
        self.resident = max(self.resident, peak.bytes - before)


def train(title: str, runs: list[Run], data: Iterator[np.ndarray], steps: int) -> None:
    """Trains for some steps under a progress line, all runs in turns.

    Args:
        title: What the line begins with.
        runs: The runs; the line shows the loss of the first one.
        data: Batches, more than `steps` of them.
        steps: Number of steps of each.
    """
    with progress_line() as line:
        task = line.add_task(title, total=steps, loss=float("nan"), speed=0.0)
        for tokens in itertools.islice(data, steps):
            for run in runs:
                run.go_on(tokens)
            speed = tokens[:, 1:].size / runs[0].durations[-1]
            line.update(task, advance=1, loss=runs[0].losses[-1], speed=speed)


def resident_memory() -> int:
    """Bytes of the process that are in memory; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class ResidentPeak:
    """Watches the process's resident memory until it is closed.

    Attributes:
        bytes: The most that was seen.
    """

    def __init__(self):
        self.bytes = resident_memory()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()

    def _look(self):
        while not self._ended.wait(0.002):
            self.bytes = max(self.bytes, resident_memory())

    def close(self):
        """Ends the watch."""
        self._ended.set()
        self._watch.join()


def progress_line() -> Progress:
    """A progress line with step, loss and speed."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        expand=True,
    )


def compiled_peak(compiled: jax.stages.Compiled) -> int:
    """Bytes that a compiled step holds at most, by the compiler's own account."""
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def size(count: int) -> str:
    """Bytes as text."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def summary(plan: jdelta.Plan, planned: Run, plain: Run, plain_peak: int) -> Table:
    """Both runs side by side."""
    table = Table("", "without jdelta", "with jdelta", title="Summary")
    for row in [
        ("loss before", *(f"{run.losses[0]:.4f}" for run in (plain, planned))),
        ("loss after", *(f"{run.losses[-1]:.4f}" for run in (plain, planned))),
        ("predicted peak", size(plan.ceiling), size(plan.predicted_peak)),
        ("budget", "none", size(plan.budget)),
        ("compiled peak", size(plain_peak), size(plan.compiled_peak)),
        ("step time", *(f"{1e3 * run.seconds:,.1f} ms" for run in (plain, planned))),
        ("resident memory of a step", *(f"+{size(run.resident)}" for run in (plain, planned))),
    ]:
        table.add_row(*row)
    if plan.spill:
        table.add_row("in files", size(0), size(plan.spill_bytes))
    return table


def verdict(plan: jdelta.Plan, target: str) -> str:
    """What the compiler says of a plan."""
    saved = 1 - plan.compiled_peak / plan.ceiling
    return (
        f"The compiler for {target} confirms a peak of {size(plan.compiled_peak)}: "
        f"under the budget of {size(plan.budget)}, and {saved:.0%} below the "
        f"{size(plan.ceiling)} of the step without jdelta. "
        f"Predicted: {size(plan.predicted_peak)}, {1e3 * plan.overhead:.1f} ms on top of "
        f"a step of {1e3 * plan.step_seconds:.1f} ms."
    )


def prices(plan: jdelta.Plan, planned: Run, plain: Run) -> str:
    """What the plan was said to cost, and what it cost."""
    measured = planned.seconds / plain.seconds - 1
    return (
        f"Time of a step with the plan: predicted {plan.overhead_share:+.1%}, measured "
        f"{measured:+.1%} (medians of {len(plain.durations)} steps each, run in turns). The "
        "prediction counts arithmetic and bytes at this machine's measured rates; what XLA:CPU "
        "makes of them, and what else the machine does, it does not know."
    )


def compare(planned: Run, plain: Run) -> float:
    """Largest relative difference between the losses of two runs."""
    return float(np.max(np.abs(np.divide(planned.losses, plain.losses) - 1)))


def train_both(args: argparse.Namespace, config: Config, console: Console) -> None:
    """Trains with a plan and without, and prints how they compare."""
    init, step_fn = make_training(config, args.steps)
    data = functools.partial(batches, read_corpus(), args.batch, args.seq)
    init, tokens = jax.jit(init), next(data())
    console.print(
        f"Plans the step, then trains {args.steps} steps with the plan and {args.steps} without, "
        "in turns. With the default settings that is one to two minutes on two idle cores."
    )
    state = init()
    plan = make_plan(args, step_fn, state, tokens)
    print(plan)
    compiled = jax.jit(step_fn, donate_argnums=0).lower(state, tokens).compile()
    planned, plain = Run(plan.jit(), state), Run(compiled, init())
    train("in turns", [planned, plain], data(), args.steps)
    console.print(summary(plan, planned, plain, compiled_peak(compiled)))
    console.print(prices(plan, planned, plain))
    difference = compare(planned, plain)
    console.print(f"Largest relative difference between the two runs' losses: {difference:.1e}")
    if not difference <= (tolerance := TOLERANCE[config.dtype]):
        sys.exit(f"The losses differ by more than {tolerance:.0e}: the plan changed the result.")


def train_one(args: argparse.Namespace, config: Config, console: Console) -> None:
    """Trains in one way, or makes the arguments alone: to look at the process from outside."""
    init, step_fn = make_training(config, args.steps)
    data = functools.partial(batches, read_corpus(), args.batch, args.seq)
    state, tokens = jax.block_until_ready(jax.jit(init)()), next(data())
    if args.only == "arguments":
        return
    if args.only == "planned":
        plan = make_plan(args, step_fn, state, tokens)
        print(plan)
        step = plan.jit()
    else:
        step = jax.jit(step_fn, donate_argnums=0).lower(state, tokens).compile()
    run = Run(step, state)
    train(args.only, [run], data(), args.steps)
    console.print(f"loss after {args.steps} steps: {run.losses[-1]:.6f}")


def make_plan(args: argparse.Namespace, step_fn: Step, state: State, tokens: Any) -> jdelta.Plan:
    """The plan that the command line asks for."""
    spill = args.spill and jdelta.Spill(args.spill, pool=args.pool, adapter=args.adapter)
    return jdelta.plan(step_fn, args.budget, state, tokens, donate_argnums=0, spill=spill)


def compile_only(args: argparse.Namespace, config: Config, console: Console) -> None:
    """Plans from shapes alone, for hardware that need not be there, and prints the verdict."""
    init, step_fn = make_training(config, args.steps)
    tokens = jax.ShapeDtypeStruct((args.batch, args.seq + 1), jnp.int32)
    plan = jdelta.plan(
        step_fn, args.budget, jax.eval_shape(init), tokens, target=args.target, donate_argnums=0
    )
    print(plan)
    console.print(verdict(plan, args.target or "this machine"))


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above zero, got {text!r}")
    return int(text)


def parse() -> tuple[argparse.Namespace, Config]:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=CONFIGS, default="nano")
    parser.add_argument("--budget", default="50%", help="48GiB, or a share of the plain peak: 50%%")
    parser.add_argument("--target", help="tpu:v5p:2x2x1, cuda:h100, ...; default: this machine")
    parser.add_argument("--spill", metavar="DIR", help="write what does not fit to files there")
    parser.add_argument("--pool", default="32MiB", help="memory for what goes to files")
    parser.add_argument("--adapter", default="disk", help="'memory' to keep it in memory instead")
    parser.add_argument("--batch", type=positive, help="sequences in a batch")
    parser.add_argument("--seq", type=positive, help="tokens in a sequence")
    parser.add_argument("--steps", type=positive, default=60, help="training steps")
    parser.add_argument("--scan", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--only",
        choices=("planned", "plain", "arguments"),
        help="train in this way alone, if at all",
    )
    parser.add_argument("--compile-only", action="store_true", help="plan and compile, do not run")
    args = parser.parse_args()
    config = dataclasses.replace(CONFIGS[args.model], scan=args.scan)
    args.batch = args.batch or config.batch
    args.seq = args.seq or config.positions
    if args.seq > config.positions:
        parser.error(f"--seq: {args.model} has {config.positions} positions, got {args.seq}")
    if args.target and not args.compile_only:
        parser.error("--target: a run uses this machine; add --compile-only to plan for another")
    return args, config


def main() -> None:
    args, config = parse()
    try:
        do = train_one if args.only else train_both
        (compile_only if args.compile_only else do)(args, config, Console())
    except jdelta.JdeltaError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
