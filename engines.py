"""The rollout engines of a run, spoken to as one: who answers which prompt, the commit that all of them share, and the
engine that takes the place of one that died.

**Requests** are divided by prompt, in turn: group g (a prompt and its samples) goes to engine g mod M, whole, so that its
prefill is done once. Answers come back in the order of the requests. A completion's seed says nothing of where it is made.

**A publication** has two phases. Every engine receives the policy and verifies the digest of what it holds (`prepare`).
When all have, one commit record is made durable, and every engine generates again (`commit`). One that refuses, or a record
that cannot be written, leaves all of them refusing until a whole publication commits.

**An engine that dies** at work is replaced: another starts in its place, the trainer sends the committed policy once more,
its digest must be the committed one, and it is asked again what the dead one was asked. Its completions are the same, as
they depend on the policy, the prompt and the seed. Each engine is replaced once in a run (a resume counts anew): its second
death ends the run with an error that names it, since what kills an engine twice will kill it again. An engine that makes
no progress ends itself (rollout.STALL_S), and so counts as dead.

An engine is one Ray actor, or one for each of its ranks (`--rollout-tensor-parallel-size`): they are asked together, answer
the same, and die together.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import checkpoint
import cluster
import rollout
from checkpoint import GuardError

START_S = 900.0  # a replacement that takes longer to start never will


class EngineDied(RuntimeError):
    """An engine died for the second time in a run, or could not be replaced."""


def divide(requests: int, group: int, engines: int) -> list[list[int]]:
    """For each engine the indices of the requests that it answers, ascending. Consecutive `group`s stay together."""
    return [[i for i in range(requests) if i // group % engines == n] for n in range(engines)]


def free_address() -> str:
    """host:port of this node where the ranks of an engine may meet; runs as a Ray task where rank 0 will be."""
    import ray

    host = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


class Engines:
    """The engines of one run.

    Args:
        start: engine number → its actors by rank, in that engine's place; called again for a replacement.
        count: engines.
        run: the run directory that commit records and logs go to.
        epoch: engine epoch of this start of the run.
        check_place: asked every second while an engine starts; raises cluster.NoPlace where it has no place to start in.

    The actors are `rollout.RolloutEngine`s. What a constructor raises comes out as Ray's RayActorError.
    """

    def __init__(
        self, start: Callable[[int], list], count: int, run: str, epoch: int, check_place: Callable[[], bool] = lambda: True
    ):
        self._start, self._run, self._epoch, self._check_place = start, run, epoch, check_place
        self._actors = [start(number) for number in range(count)]
        self._holder: tuple[str, str] | None = None  # (run, lock owner)
        self._send: Callable[[int], Mapping] | None = None
        self._record: Mapping[str, Any] | None = None  # of the committed policy
        self._replaced: set[int] = set()
        self.say: Callable[[str], None] = lambda text: print(text, flush=True)
        self._facts: dict[int, list[dict]] = {}  # by engine, then by rank
        for number in range(count):
            self._meet(number)

    def facts(self) -> dict[str, Any]:
        """What a run records: engine 0's facts, and how many there are."""
        return {**self._facts[0][0], "engines": len(self._actors), "ranks": len(self._actors[0])}

    def processes(self) -> dict[str, Any]:
        """The actors that there are now, by the name of their log."""
        return {rollout.log_name(n, i): actor for n, ranks in enumerate(self._actors) for i, actor in enumerate(ranks)}

    def hold(self, run: str, owner: str) -> None:
        """Every process of every engine holds the run's lock (`RolloutEngine.hold`), later ones as well."""
        self._holder = run, owner
        self._ask("hold", self._each(run, owner))

    def publish(self, version: int, send: Callable[[int], Mapping]) -> None:
        """Publish one policy to every engine and commit it.

        send: version → the manifest, what it names can be read until the next call; kept, and called again where an engine is
        replaced. Once more with the committed version changes nothing but engines that do not hold it.
        GuardError: an engine refused, or the commit record did not become durable.
        """
        self._send, self._record = send, None
        try:
            manifest = send(version)
            self._ask("prepare", self._each(manifest))
            record = rollout.commit_record(version, manifest["digest"], self._epoch, len(manifest["tensors"]))
            try:
                checkpoint.append_commit(self._run, record)
            except Exception as error:
                raise GuardError(f"publication refused: version {version} could not be committed: {error}") from error
        except BaseException as error:
            for ranks in self._actors:
                for actor in ranks:
                    actor.refuse.remote(str(getattr(error, "cause", None) or error))  # not waited for: one may hang
            raise
        self._record = record
        self._ask("commit", self._each(record))

    def generate(self, requests: list[Mapping[str, Any]], group: int) -> list[dict[str, Any]]:
        """Completions of `requests` in their order; every `group` of consecutive ones has one prompt. See
        `RolloutEngine.generate` for request, completion and errors."""
        shares = divide(len(requests), group, len(self._actors))
        asked = {n: ([requests[i] for i in share],) for n, share in enumerate(shares) if share}
        completions: list = [None] * len(requests)
        for n, answers in self._ask("generate", asked).items():
            for i, answer in zip(shares[n], answers, strict=True):
                completions[i] = answer
        return completions

    def reset_caches(self) -> None:
        """Every engine forgets its cached keys and values."""
        self._ask("reset_caches", self._each())

    # -- asking --

    def _each(self, *arguments: Any) -> dict[int, tuple]:
        return dict.fromkeys(range(len(self._actors)), arguments)

    def _ask(self, method: str, asked: Mapping[int, tuple]) -> dict[int, Any]:
        """Call `method` with each engine's arguments on the engines named, all at once, and wait for all. Those that died are
        replaced and asked once more. Any other failure is raised when all have answered."""
        from ray.exceptions import RayActorError

        calls = {n: self._call(n, method, *arguments) for n, arguments in asked.items()}
        answers, dead, failure = {}, [], None
        for n, refs in calls.items():
            try:
                answers[n] = self._answer(n, refs)
            except RayActorError:
                dead.append(n)
            except Exception as error:
                failure = failure or error
        if failure:
            raise failure
        self._replace(dead, method)
        for n, refs in {n: self._call(n, method, *asked[n]) for n in dead}.items():
            with self._its_end_ends_the_run(n, method):
                answers[n] = self._answer(n, refs)
        return answers

    def _call(self, n: int, method: str, *arguments: Any) -> list:
        return [getattr(actor, method).remote(*arguments) for actor in self._actors[n]]

    def _answer(self, n: int, refs: list, start_s: float | None = None) -> Any:
        """Rank 0's answer, when all ranks have given theirs. A failure is raised at once, as the other ranks may wait for that
        one; but a rank whose peer died fails of it, perhaps before the death is known, and then it is the death that counts.
        start_s: of an engine that is starting, how long it may take."""
        import ray
        from ray.exceptions import RayActorError

        waiting, began = list(refs), time.monotonic()
        while waiting:
            done, waiting = ray.wait(waiting, timeout=None if start_s is None else 1)
            if not done:
                self._check_place()
                if time.monotonic() - began > start_s:
                    raise EngineDied(f"engine {n} was to be replaced and did not start within {start_s:g} s")
                continue
            try:
                ray.get(done)
            except RayActorError:
                raise
            except Exception:
                for ref in ray.wait(waiting, num_returns=len(waiting), timeout=10)[0] if waiting else ():
                    with contextlib.suppress(ray.exceptions.RayTaskError):
                        ray.get(ref)
                raise
        first, *others = ray.get(refs)
        if isinstance(first, list) and any(_tokens(first) != _tokens(other) for other in others):
            raise GuardError(f"the ranks of engine {n} sampled different tokens")
        return first

    # -- replacing --

    def _replace(self, dead: list[int], method: str) -> None:
        """Put another engine in the place of each, as far on as the run is: lock held, committed policy published."""
        import ray

        for n in dead:
            with self._its_end_ends_the_run(n, method):
                if n in self._replaced:
                    raise ray.exceptions.RayActorError
            self._replaced.add(n)
            self.say(f"{self._name(n)} died during {method}; another takes its place")
            for actor in self._actors[n]:
                ray.kill(actor)  # the other ranks wait for the dead one
            with self._its_end_ends_the_run(n, "its start"):
                self._actors[n] = self._start(n)
        for n in dead:
            with self._its_end_ends_the_run(n, "its start"):
                self._meet(n, START_S)
                if self._holder:
                    self._answer(n, self._call(n, "hold", *self._holder))
        if not dead or self._record is None:
            return
        manifest = self._send(self._record["version"])
        if manifest["digest"] != self._record["digest"]:
            raise GuardError(
                f"version {self._record['version']} is committed with digest {self._record['digest']}, to engine"
                f" {dead[0]} the trainer sends {manifest['digest']}"
            )
        for call, argument in (("prepare", manifest), ("commit", self._record)):
            for n, refs in {n: self._call(n, call, argument) for n in dead}.items():
                with self._its_end_ends_the_run(n, call):
                    self._answer(n, refs)

    @contextlib.contextmanager
    def _its_end_ends_the_run(self, n: int, method: str):
        from ray.exceptions import RayActorError

        try:
            yield
        except cluster.NoPlace as error:
            raise EngineDied(f"{self._name(n)} died, and there is no place for another: {error}") from None
        except RayActorError:
            logs = [Path(self._run) / "logs" / f"{rollout.log_name(n, rank)}.log" for rank in range(len(self._actors[n]))]
            ends = "; ".join(map(_last_lines, logs))
            raise EngineDied(f"{self._name(n)} died a second time in this run, during {method}; {ends}") from None

    def _meet(self, n: int, start_s: float = math.inf) -> None:
        """Wait until an engine has started."""
        import ray

        refs = self._call(n, "facts")
        self._answer(n, refs, start_s)
        self._facts[n] = ray.get(refs)

    def _name(self, n: int) -> str:
        pids = [str(facts["pid"]) for facts in self._facts[n]]
        return f"engine {n} (pid{'s' if len(pids) > 1 else ''} {', '.join(pids)})"


def _tokens(completions: list) -> list:
    return [c["response_tokens"] for c in completions]


def _last_lines(log: Path, count: int = 5) -> str:
    """The end of an engine's log, on one line."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        lines = []
    return f"{log} ends: {' | '.join(lines)}" if lines else f"{log} says nothing"
