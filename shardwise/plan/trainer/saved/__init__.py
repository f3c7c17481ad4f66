"""What a stage of this project's trainer saves in the forward pass of a microbatch for the backward pass, tensor by tensor.

The rule is PyTorch's: an operation keeps those of its inputs and results that its gradient needs, tensors that several
operations keep count once, and a part that is computed again keeps its inputs instead. What the modules of `model/` keep, for
n rows of d numbers; w is the width of the arithmetic, W that of what 16 bits would spoil (w, or 4 bytes):

    linear       its input, gathered over the tensor ranks where it is; and, where parameters are held wider than the
                 arithmetic and `fully_shard` has not cast them as it gathered them, the copy of its weight that was cast.
                 In 8 bits its weight turned, unless it was gathered so; with one scale a tensor the turned 8-bit input in
                 the place of the input; and the scales
    rms norm     fused (CUDA): input and n W. Composed of small operations (CPU): the input and the input divided by its
                 length, both widened, and n W
    layer norm   input, means and deviations: 2 n w
    rotary       cosines and sines, once for all layers
    attention    queries, keys, values, output and the log-sum-exp of each row; where PyTorch has no fused kernel queries,
                 keys, values widened, and the whole matrix of scores; a mask of its own in each layer where there is a window,
                 unless attention is told how wide it is (CUDA, 16 bits)
      ring       the same; its output is copied for the product that follows
      ulysses    the same of a part of the heads over the whole sequence, the order of tokens, and the output dealt back
      gather     keys and values of the whole sequence, in order, and a mask
    gate, up     silu and gelu keep their input, their product with `up` both factors; relu keeps its result
    router       its input widened, or as it is where it multiplies in parts (CUDA, bfloat16); scores, choices, weights
    experts      rows in the order of their experts, what gate and up keep of them, and the results of each token, to be weighed;
                 the order and the way back, or the place of each choice alone where kernels move the rows (CUDA)
    loss         probabilities of the vocabulary, widened; over tensor ranks also which targets are mine. In chunks: the
                 gradients of its input and, widened, of the head's matrix

Between stages: what came from the stage before, and what went to the one after.
Two things a run does not say are assumed: routers choose all experts alike, unless the rows are given; and documents are
not packed.
"""

from shardwise.plan.trainer.saved.stage import Rows, Saved, repeated, saved

__all__ = ["Rows", "Saved", "repeated", "saved"]
