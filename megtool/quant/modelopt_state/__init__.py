"""ModelOpt's quantizers in Megatron checkpoints: settings, amaxes, and weights on the grid."""
