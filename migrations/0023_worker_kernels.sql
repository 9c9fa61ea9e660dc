-- The CPU kernels of a worker, as JSON: {isa, avx512_bf16_gain}. NULL = a worker on a GPU, or of an older version.
ALTER TABLE workers ADD COLUMN kernels TEXT;
