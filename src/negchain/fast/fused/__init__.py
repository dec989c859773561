"""The losses on a GPU in a dozen kernel launches; the readable twin is `negchain.losses`.

    layout     rows and columns of a batch: unit length, order of proposal, carried states; and back
    rows       a small batch: one program per row turns its similarities into EMC²'s weights
    in_batch   the same for InfoNCE, DCL and SogCLR
    tiles      a large batch: similarities are computed, scanned and forgotten, tile by tile
    gather     its backward pass: what the rows weigh, sorted by column
    ranks      order of proposal and repeated ids, by sorting
    commit     state for the next visit, and the value
    function   the loss of one side as one differentiable function of the embeddings: `forward`, and
               the way back; what they share is a `plan`

Draws, results and state are those of the twin for the same seed and step, up to rounding: a
Metropolis-Hastings comparison within rounding of a tie may fall the other way.
"""

MAX_COLUMNS = 1024  # a row's columns that fit into one program's registers
