"""What the numbers of a run mean and what to do about it, in a sentence each.

Curves are judged by their last quarter: a bad start that was overcome does not count.
"""

import math

from negchain.methods import METHODS
from negchain.tasks import COLLAPSED, EXACT

from .measures import number
from .runs import Group, Run
from .statistics import interval_of, over_start

IDLE = 0.01
"""Carried mass below this: chains add nothing."""
REVISITED = 2
"""Passes before which chains, which begin at a first visit, can have carried next to nothing."""
STUCK, RESTLESS = 0.02, 0.95
"""Acceptance below or above these: chains do not move, or move at random."""


def advice(run: Run) -> list[str]:
    """Sentences about what looks wrong in a run; empty when nothing does."""
    said = []
    variance = late(run, "embedding_variance")  # the encoder that was kept may be older
    collapsed = variance is not None and variance < COLLAPSED
    if collapsed:
        layers = (
            "" if run.config.get("norm") == "batch" else "normalisation layers (--norm batch), "
        )
        said.append(
            f"The embeddings have collapsed: their variance is {number(variance)} (1 when they "
            "spread over the sphere), so nearly all images look alike to the encoder. Try a longer "
            f"warm-up (--warmup-epochs), a smaller --lr, {layers}or a smaller --beta."
        )
    carried, accepted = late(run, "carried_mass"), late(run, "acceptance_rate")
    early = run.passes is not None and run.passes < REVISITED
    if carried is not None and carried < IDLE and not collapsed and not early:
        said.append(
            f"The carried negatives have {number(carried, 'percent')} of the weight: the chains "
            "add next to nothing to the batch, and DCL would give nearly the same gradient at less "
            "cost. This happens when a batch already holds the hardest negatives. "
            "Try a smaller --batch-size, a larger --beta or a smaller --burn-in; or --method dcl."
        )
    if accepted is not None and accepted < STUCK:
        said.append(
            f"The chains accept {number(accepted, 'percent')} of their proposals: each sits on one "
            "very hard negative. Look at what they hold below: duplicates of the image, or others "
            "that show the same thing, are no negatives (negchain duplicates finds them). If they "
            "are true negatives, lower --beta."
        )
    method = METHODS.get(str(run.config.get("method")))
    walks = method is not None and "burn_in" in method.options  # not i-SIR, which accepts at once
    if accepted is not None and accepted > RESTLESS and walks:
        why = "because the embeddings have collapsed" if collapsed else "--beta is too small"
        said.append(
            f"The chains accept {number(accepted, 'percent')} of their proposals: all negatives "
            f"weigh about the same, so the chains walk at random; {why}."
            + ("" if collapsed else " Raise it.")
        )
    return said


def late(run: Run, key: str) -> float | None:
    """The mean of the last quarter of a curve."""
    values = run.curve(key).values
    return float(values[-math.ceil(len(values) / 4) :].mean()) if len(values) else None


def best_by(run: Run) -> str:
    """By what --patience chose the encoder that a run kept, in words."""
    return "the exact loss" if (run.summary or {}).get("score_by") == EXACT else "validation"


def against_baselines(run: Run) -> list[str]:
    """Whether training shows in the numbers, in a sentence per measure; empty without labels."""
    said = []
    for metric in run.shown.lead:
        key, name = metric.key, metric.name
        value, base = run.final(key), run.baseline(key)
        named = {k: text for k, text in run.shown.baselines.items() if k != "chance"}
        known = [(base[k], _in_text(text)) for k, text in named.items() if k in base]
        if value is None or not known or not run.finished:
            continue
        best, text = max(known)
        (gain,) = over_start([Group(run.name, "", 0, {}, [run])], key)
        if paired := gain is not None and gain.interval is not None:  # the same items, twice
            (low, high), points = gain.interval, gain.in_points()
        else:
            interval = interval_of(run, key)
            unknown = "" if interval else " (how much of it is noise is not known)"
            points = f"{100 * (value - best):.1f} points{unknown}"
            low, high = (end - best for end in interval or (value, value))
        reached = f"reach{'' if text.endswith('s') else 'es'} {number(best, metric.unit)}"
        shown = f"on this data {text} already {reached}"
        if low > 0:
            said.append(f"{name}: training gained {points} over {text}, which {reached} here.")
        elif value > best:
            noise = f"within the noise of the {run.shown.tested}"
            said.append(f"{name}: the gain, {points}, is {noise}; {shown}.")
        elif paired and high < 0:
            said.append(f"{name}: training made it worse, {points}; {shown}.")
        else:
            change = f", {points}" if paired and value != best else ""
            said.append(f"{name}: training shows no gain{change}; {shown}.")
    return said


def _in_text(name: str) -> str:
    """A baseline's name within a sentence."""
    name = name.lower()
    return name if name.endswith("s") else f"the {name}"
