"""Everything that is fast and hard to read: Triton kernels, CUDA streams, fused layers.

Each piece has a readable twin elsewhere in the package with the same results, and an `applies` (or
the like) that says when it may take the twin's place. Nothing outside this folder imports Triton.

    fused/      the losses in a dozen kernel launches; twin: `negchain.losses`
    augment/    augmentation in four; twin: `negchain.augment`
    encoder     one fast path for every encoder: compiled (beside) or by hand (layers/);
                twin: the encoder itself
    scan_triton, rng_triton    twins: `weights.metropolis`, `negchain.rng`
    backends    whether Triton can run here
    streams     work beside other work on one GPU; gradients of weights there
"""
