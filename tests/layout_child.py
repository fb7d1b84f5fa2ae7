"""One rank of a trainer of several processes, for test_layouts.py: `layout_child.py RANK SIZE T FOLDER [JOB…]`.

Rank 0 writes what it saw of each job to FOLDER/results.pt: metrics, full parameters, digests, or the error that was raised.
"""

import random
import sys
import time
from pathlib import Path

import job
import torch

import checkpoint
import provider
import rollout
import trainer

ALGORITHMS = ("grpo", "ppo", "dppo", "flow-dppo")


def batch(count: int, seed: int, empty: bool = False) -> list[dict]:
    """Completions of very different lengths, some of one token.

    empty: every second one has no token, and the longest prompt, so it is the one that data-parallel rank 0 is given first.
    """
    draw = random.Random(seed)
    rows = [
        {
            "prompt_tokens": [draw.randrange(3, 100) for _ in range(draw.randrange(3, 20))],
            "response_tokens": [draw.randrange(3, 100) for _ in range(draw.choice((1, 2, 5, 11, 30)))],
            "reward": draw.random(),
        }
        for _ in range(count)
    ]
    for row in rows[::2] if empty else ():
        row |= {"prompt_tokens": row["prompt_tokens"] * 20, "response_tokens": []}
    return rows


def replayed(t: trainer.Trainer, rows: list[dict]) -> list[dict]:
    """The same completions with the log-probabilities that the trainer itself gives them."""
    rows = [{**row, "log_probs": [0.0] * len(row["response_tokens"])} for row in rows]
    old = {}
    multiple = t.ranks.tp_size if t.settings.sequence_parallel else 1
    t._score(trainer.make_packs(rows, list(range(len(rows))), 10**6, "cpu", multiple), old, {})
    return [{**row, "log_probs": old[i].tolist()} for i, row in enumerate(rows)]


class Child:
    def __init__(self, rank: int, size: int, tensor: int, folder: Path):
        self.rank, self.size, self.tensor, self.folder = rank, size, tensor, folder
        self.results: dict = {}

    def make(self, algorithm: str, **changes) -> trainer.Trainer:
        lr = 1e-3 if changes.get("optimizer") == "sgd" else 1e-4
        settings = {
            "optimizer": "adam", "lr": lr, "critic_lr": lr, "max_logprob_error": 1e-3, "micro_batch_tokens": 100,
            "n_samples_per_prompt": 2, "tensor_model_parallel_size": self.tensor, **changes,
        }  # fmt: skip
        settings = trainer.TrainerSettings(model=str(job.TINY / "model"), algorithm=algorithm, **settings)
        t = trainer.Trainer(settings, self.rank, self.size)
        if self.size > 1:
            address = self.folder / "address"
            if self.rank == 0 and not address.exists():
                (self.folder / "address.tmp").write_text(t.rendezvous("127.0.0.1"))
                (self.folder / "address.tmp").rename(address)
            while not address.exists():
                time.sleep(0.02)
            Child.store = getattr(Child, "store", None) or t  # the first trainer's store serves them all
            t._store = Child.store._store
            t.start(address.read_text())
        return t

    def update(self, algorithm: str, count: int = 8, empty: bool = False, **changes) -> dict:
        """Two updates: metrics of both, and the full tensors before and after them."""
        t = self.make(algorithm, **changes)
        networks = [n for n in (t.actor, t.critic) if n is not None]

        def tensors():
            return {f"{n.name}.{k}": v.clone() for n in networks for k, v in provider.export_native(n.model)}

        before = tensors()
        metrics = [t.train(replayed(t, batch(count, seed, empty)), seed) for seed in (0, 1)]
        after = tensors()
        moments = {f"{n.name}.{k}": v.clone() for n in networks for k, v in n.optimizer_tensors()}
        return {"metrics": metrics, "before": before, "after": after, "moments": moments, "facts": t._facts()}

    # -- guards --

    def stopped(self, spoil, error: str, **changes) -> dict:
        """An update that a guard stops: what it said, and whether anything moved."""
        t = self.make("ppo", **changes)
        before = t._facts()["tensors"]
        rows = replayed(t, batch(8, 0))
        spoil(t, rows)
        try:
            t.train(rows, 3)
        except checkpoint.GuardError as stop:
            assert error in str(stop), stop
            t._digest_cache = None
            return {"said": str(stop), "still": t._facts()["tensors"]["actor"] == before["actor"]}
        raise AssertionError("no guard stopped it")

    def off_by(self, t, rows) -> None:
        rows[5]["log_probs"][0] += 2e-3

    def infinite(self, t, rows) -> None:
        if self.rank == self.size - 1:  # on one rank alone
            t.actor.model.layers[1].mlp.linear_fc2.weight.register_hook(lambda g: g * float("inf"))

    # -- what is durable --

    def run_dir(self, name: str) -> Path:
        return self.folder.parent / f"run-{self.folder.name}-{name}"

    def save(self, name: str, **changes) -> dict:
        """Two updates, a checkpoint, a publication, and a third update to compare a resume with."""
        run = self.run_dir(name)
        t = self.make("ppo", **changes)
        if self.rank == 0:
            checkpoint.create_run(run, {})
        for update in (0, 1):
            t.train(replayed(t, batch(8, update)), update)
            if self.rank == 0:
                checkpoint.append_rollouts(run, update, [{}])
                checkpoint.append_metrics(run, {"update": update})
        rows = replayed(t, batch(8, 2))
        torch.rand(self.rank + 1)  # every process has an RNG state of its own
        t.snapshot(str(run), 2)
        metrics = t.train(rows, 2)  # may begin before the checkpoint is visible
        t.write_checkpoint(str(run), 2, 8, 2)
        t.wait_for_checkpoint()
        return {"run": str(run), "rows": rows, "metrics": metrics, "facts": t._facts(), "published": self.publish(t, run)}

    def publish(self, t, run: Path) -> dict:
        """What an engine would put together of the senders' files."""
        manifest = t.publish(4, "disk", str(run / "publications" / "current.safetensors"))
        if manifest is None:
            return {}
        held = checkpoint.digest_of(dict(rollout.received(manifest, "cpu")))
        return {"stated": manifest["digest"], "held": held, "parts": manifest.get("parts"), "tensors": manifest["tensors"]}

    def load(self, algorithm="ppo", **changes) -> dict:
        """Checkpoints of one process and of this layout (or of LAYOUT, where the folder is again-LAYOUT): what is held after
        loading each, and the third update."""
        found = {}
        layouts = {"1x1", self.folder.name.removeprefix("again-").removesuffix("-bf16")}
        runs = sorted(run for layout in layouts for run in self.folder.parent.glob(f"run-{layout}-*"))
        for run in (run for run in runs if ("bf16" in run.name) == ("precision" in changes)):
            t = self.make(algorithm, **changes)
            t.load(str(run), 2)
            held = t._facts()
            saved = torch.load(run / "rows.pt")
            metrics = t.train(saved["rows"], 2)
            found[run.name] = {"held": held, "metrics": metrics, "facts": t._facts()}
        return found


def jobs(child: Child) -> dict:
    found = {f"{a} {o}": (lambda a=a, o=o: child.update(a, optimizer=o)) for a in ALGORITHMS for o in ("sgd", "adam")}
    found["recompute"] = lambda: child.update("flow-dppo", recompute=True)
    found["few"] = lambda: child.update("flow-dppo", count=2)  # one completion a step: half the data-parallel ranks have none
    # Two completions a step, of which one has tokens: with two data-parallel ranks, rank 0 has none to learn from.
    found["empty grpo"] = lambda: child.update("grpo", count=2, empty=True)
    found["empty ppo"] = lambda: child.update("ppo", count=2, empty=True)
    found["empty flow-dppo"] = lambda: child.update("flow-dppo", count=4, empty=True)
    found["bf16"] = lambda: child.update("grpo", precision="bf16", max_logprob_error=1.0)
    if child.tensor > 1:
        found["sequence"] = lambda: child.update("flow-dppo", sequence_parallel=True)
        found["sequence recompute"] = lambda: child.update("ppo", sequence_parallel=True, recompute=True)
    found["distributed"] = lambda: child.update("flow-dppo", distributed_optimizer=True)
    found["distributed bf16"] = lambda: child.update("grpo", precision="bf16", distributed_optimizer=True, max_logprob_error=1.0)
    if child.tensor > 1:
        found["all"] = lambda: child.update("ppo", sequence_parallel=True, recompute=True, distributed_optimizer=True)
    found["guard"] = lambda: child.stopped(child.off_by, "update 3: replay guard: sample 5, response token 0")
    found["gradient"] = lambda: child.stopped(child.infinite, "layers.1.mlp.linear_fc2.weight is not finite")
    found["save"] = lambda: child.save("plain")
    found["save distributed"] = lambda: child.save("distributed", distributed_optimizer=True)
    found["load"] = lambda: child.load()
    found["load distributed"] = lambda: child.load(distributed_optimizer=True)
    half = {"precision": "bf16", "max_logprob_error": 1.0}
    found["save bf16"] = lambda: child.save("bf16", **half)
    found["save bf16 distributed"] = lambda: child.save("bf16-distributed", distributed_optimizer=True, **half)
    found["load bf16"] = lambda: child.load(**half)
    found["load bf16 distributed"] = lambda: child.load(distributed_optimizer=True, **half)
    return found


def main() -> None:
    rank, size, tensor = map(int, sys.argv[1:4])
    child = Child(rank, size, tensor, Path(sys.argv[4]))
    known = jobs(child)
    results = {}
    for name in sys.argv[5:] or known:
        began = time.time()
        try:
            results[name] = known[name]()
        except checkpoint.GuardError as error:
            results[name] = {"error": str(error)}
        results[name]["seconds"] = time.time() - began
        if rank == 0 and "run" in results[name]:
            torch.save(results[name], Path(results[name]["run"]) / "rows.pt")
    torch.save(results, child.folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
