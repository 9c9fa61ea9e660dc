// Attention: the fold over blocks of keys, packed batches, and their backward pass.
#pragma once
#include "attention_fold.cuh"
#include "attention_packed.cuh"
#include "attention_backward.cuh"
