-- Which kernels a worker on the processor uses, as JSON: {isa, avx512_bf16_gain}. NULL = a GPU's worker, or an older one.
ALTER TABLE workers ADD COLUMN kernels TEXT;
