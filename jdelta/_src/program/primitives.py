"""How compilers treat JAX primitives: the classes that the peak and cost models share."""

from jdelta._src._jax import COTANGENT

MATMULS = frozenset({"dot_general", "conv_general_dilated"})
"""Run on the matrix unit."""

LOOPS = frozenset({"scan", "while"})
"""Run a body some number of times."""

VIEWS = frozenset(
    "name reshape squeeze expand_dims stop_gradient copy copy_p reduce_precision transpose"
    f" sharding_constraint pvary pcast mesh_cast device_put {COTANGENT}".split()
)
"""Another reading of the same bytes (a transpose is a layout, decided by the compiler)."""

FREE = frozenset("broadcast_in_dim iota empty create_token full".split())
"""Made on the fly by whatever reads it, at no cost in memory."""

SPLITS = frozenset({"split", "unstack"})
"""Hand out parts of what they read, each as a result of its own."""

CHEAP = SPLITS | frozenset(
    "add add_any sub mul div rem max min neg abs sign floor ceil round select_n eq ne lt le"
    " gt ge and or not xor shift_left shift_right_logical shift_right_arithmetic"
    " convert_element_type bitcast_convert_type clamp integer_pow square is_finite real imag"
    " conj complex slice dynamic_slice pad rev one_minus_square population_count clz nextafter"
    " random_wrap random_unwrap eq_to le_to lt_to mulhi".split()
)
"""Element-wise and cheap enough to be computed again in every reader."""

PARTS = frozenset({"real", "imag"})
"""What a complex value is kept as."""

BITS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})
"""Make an array of random bits, at a hundred instructions an element."""

RANDOM = BITS | frozenset("random_fold_in random_split random_seed".split())
"""Random bits, and keys."""

EXPENSIVE = RANDOM | frozenset(
    "exp exp2 expm1 log log1p log2 tanh sin cos tan asin acos atan atan2 sinh cosh asinh acosh"
    " atanh logistic erf erfc erf_inv pow sqrt rsqrt cbrt lgamma digamma polynomial"
    " bessel_i0e bessel_i1e zeta polygamma".split()
)
"""Element-wise, at many instructions each."""

_POOLING = "reduce_window_sum reduce_window_max reduce_window_min reduce_window"

SUMS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax"
    " argmin".split()
)
"""Make one value of many, along some axes."""

REDUCTIONS = SUMS | frozenset(
    f"cumsum cumprod cummax cummin cumlogsumexp {_POOLING} select_and_gather_add".split()
)
"""Fuse what they read, but write their result."""

UPDATES = frozenset(
    "dynamic_update_slice scatter scatter-add scatter-sub scatter-mul scatter-min"
    " scatter-max".split()
)
"""Their first operand with a part of it changed: in place, if nothing reads it afterwards."""

WINDOWS = frozenset(
    f"{_POOLING} select_and_gather_add select_and_scatter select_and_scatter_add".split()
)
"""Pool images, and their derivatives."""
