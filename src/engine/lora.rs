//! LoRA adapters: PEFT's names, layout and initialisation.
