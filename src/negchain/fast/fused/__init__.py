"""The losses on a GPU in a dozen kernel launches; the readable twin is `negchain.losses`.

    function   the loss of one side as one differentiable function of the embeddings
    forward    launches its forward pass, sorts ids; the backward pass is in `function`
    plan       what both are given, and what the first leaves for the second

Kernels, in the order of a step:

    layout     rows and columns of a batch: unit length, order of proposal, carried states; and the
               gradients' way back
    tiles      a large batch: similarities are computed, scanned and forgotten, tile by tile
    rows       one program per row: weights, from similarities of a small batch or after tiles
    objective  a row's value and factor, inside the kernels above
    commit     state for the next visit, and the value
    gather     backward pass of a large batch: what the rows weigh, sorted by column

Draws, results and state are those of the twin for the same seed and step, up to rounding: a
Metropolis-Hastings comparison within rounding of a tie may fall the other way.
"""

MAX_COLUMNS = 1024  # a row's columns that fit into one program's registers
