"""Every contact with parts of JAX that move between versions.

Tested on jax 0.10, 0.11 and 0.12. Another version is followed by changes in here: what these
functions take and give stays. From the lowest floor up, each room importing only from those before:

- ``values``: arrays and variables, by what their types say.
- ``hooks``: what is put into a running trace: a session, and functions in the place of JAX's own.
- ``effects``: what programs do beside giving results.
- ``jaxprs``: jaxprs traced, taken apart and put together. In 0.11 ``Jaxpr`` and ``ClosedJaxpr``
  became one class.
- ``interpreter``: programs evaluated, with a hook at each equation.
- ``digest``: what a program is, so that two can be told apart.
- ``equation``: what one equation says, and new ones made. In 0.11 a ``scan`` came to count its
  inputs in another way.
- ``job``: what the processes of a job tell each other.
- ``meshes``: the meshes of devices that a program runs over.
- ``places``: where in the user's code things come from.
- ``outside``: a trace that leaves to the one around it what does not depend on its arguments.
- ``checkpoint``: ``jax.checkpoint`` with its policies and names. ``jax_remat3`` writes all of them
  in another way, and 0.10 ignores policies with it on.
- ``bodies``: the programs inside of equations, by the names of primitives, which come and go
  (0.12 has no ``closed_call``).

All else in jdelta says ``_jax.name`` and need not know the rooms. The rules of jdelta's own
primitives are in ``region_primitive.py``; what is below jaxprs is the business of ``sharding.py``.
"""

from jdelta._src._jax.bodies import equations as equations
from jdelta._src._jax.bodies import first_once as first_once
from jdelta._src._jax.bodies import inline as inline
from jdelta._src._jax.bodies import is_call as is_call
from jdelta._src._jax.bodies import is_checkpoint as is_checkpoint
from jdelta._src._jax.bodies import label as label
from jdelta._src._jax.bodies import may_inline as may_inline
from jdelta._src._jax.bodies import nothing as nothing
from jdelta._src._jax.bodies import programs_in as programs_in
from jdelta._src._jax.bodies import subjaxpr as subjaxpr
from jdelta._src._jax.bodies import subjaxprs as subjaxprs
from jdelta._src._jax.bodies import with_bodies as with_bodies
from jdelta._src._jax.bodies import with_replaced as with_replaced
from jdelta._src._jax.bodies import without_debugging as without_debugging
from jdelta._src._jax.checkpoint import answer as answer
from jdelta._src._jax.checkpoint import checkpointed as checkpointed
from jdelta._src._jax.checkpoint import is_shielded as is_shielded
from jdelta._src._jax.checkpoint import name_equation as name_equation
from jdelta._src._jax.checkpoint import named_value as named_value
from jdelta._src._jax.checkpoint import plain as plain
from jdelta._src._jax.checkpoint import remat_equation as remat_equation
from jdelta._src._jax.checkpoint import renamed as renamed
from jdelta._src._jax.checkpoint import watch_checkpoints as watch_checkpoints
from jdelta._src._jax.digest import digest as digest
from jdelta._src._jax.digest import names_count as names_count
from jdelta._src._jax.effects import by_position as by_position
from jdelta._src._jax.effects import happens_once as happens_once
from jdelta._src._jax.effects import is_ref as is_ref
from jdelta._src._jax.equation import COTANGENT as COTANGENT
from jdelta._src._jax.equation import DEBUG as DEBUG
from jdelta._src._jax.equation import REGION as REGION
from jdelta._src._jax.equation import complex_equation as complex_equation
from jdelta._src._jax.equation import copy_equation as copy_equation
from jdelta._src._jax.equation import in_fresh_variables as in_fresh_variables
from jdelta._src._jax.equation import in_scopes as in_scopes
from jdelta._src._jax.equation import is_backward as is_backward
from jdelta._src._jax.equation import is_backward_of_backward as is_backward_of_backward
from jdelta._src._jax.equation import is_differentiated as is_differentiated
from jdelta._src._jax.equation import manual_axes as manual_axes
from jdelta._src._jax.equation import name_stack as name_stack
from jdelta._src._jax.equation import part_equations as part_equations
from jdelta._src._jax.equation import rounding_equation as rounding_equation
from jdelta._src._jax.equation import scan_counts as scan_counts
from jdelta._src._jax.equation import scan_equation as scan_equation
from jdelta._src._jax.equation import scattered_into_own_zeros as scattered_into_own_zeros
from jdelta._src._jax.equation import stacked as stacked
from jdelta._src._jax.equation import with_barriers as with_barriers
from jdelta._src._jax.equation import with_scopes as with_scopes
from jdelta._src._jax.hooks import LINEARIZE as LINEARIZE
from jdelta._src._jax.hooks import SCAN as SCAN
from jdelta._src._jax.hooks import VJP as VJP
from jdelta._src._jax.hooks import current_session as current_session
from jdelta._src._jax.hooks import session_context as session_context
from jdelta._src._jax.interpreter import Env as Env
from jdelta._src._jax.interpreter import Hook as Hook
from jdelta._src._jax.interpreter import evaluate as evaluate
from jdelta._src._jax.interpreter import interpret as interpret
from jdelta._src._jax.interpreter import of_some as of_some
from jdelta._src._jax.interpreter import read as read
from jdelta._src._jax.interpreter import retraced as retraced
from jdelta._src._jax.interpreter import run as run
from jdelta._src._jax.interpreter import write as write
from jdelta._src._jax.jaxprs import Eqn as Eqn
from jdelta._src._jax.jaxprs import Jaxpr as Jaxpr
from jdelta._src._jax.jaxprs import body_of as body_of
from jdelta._src._jax.jaxprs import closed_jaxpr as closed_jaxpr
from jdelta._src._jax.jaxprs import consts_of as consts_of
from jdelta._src._jax.jaxprs import dependents as dependents
from jdelta._src._jax.jaxprs import function_name as function_name
from jdelta._src._jax.jaxprs import hoist_consts as hoist_consts
from jdelta._src._jax.jaxprs import jaxpr_of as jaxpr_of
from jdelta._src._jax.jaxprs import leaked as leaked
from jdelta._src._jax.jaxprs import open_jaxpr as open_jaxpr
from jdelta._src._jax.jaxprs import program_of as program_of
from jdelta._src._jax.jaxprs import rebuild as rebuild
from jdelta._src._jax.jaxprs import single as single
from jdelta._src._jax.jaxprs import stage as stage
from jdelta._src._jax.jaxprs import variables as variables
from jdelta._src._jax.jaxprs import with_equations as with_equations
from jdelta._src._jax.jaxprs import with_outputs as with_outputs
from jdelta._src._jax.job import heard as heard
from jdelta._src._jax.job import tell as tell
from jdelta._src._jax.meshes import current_mesh as current_mesh
from jdelta._src._jax.meshes import meshes_in as meshes_in
from jdelta._src._jax.outside import outside_of as outside_of
from jdelta._src._jax.places import at_call as at_call
from jdelta._src._jax.places import line_of as line_of
from jdelta._src._jax.places import place_of as place_of
from jdelta._src._jax.places import place_of_error as place_of_error
from jdelta._src._jax.places import place_of_tracer as place_of_tracer
from jdelta._src._jax.values import Atom as Atom
from jdelta._src._jax.values import Var as Var
from jdelta._src._jax.values import bytes_of as bytes_of
from jdelta._src._jax.values import has_explicit_axes as has_explicit_axes
from jdelta._src._jax.values import is_array as is_array
from jdelta._src._jax.values import is_complex as is_complex
from jdelta._src._jax.values import is_computed as is_computed
from jdelta._src._jax.values import is_inexact as is_inexact
from jdelta._src._jax.values import is_real as is_real
from jdelta._src._jax.values import is_var as is_var
from jdelta._src._jax.values import new_var as new_var
from jdelta._src._jax.values import on_host as on_host
from jdelta._src._jax.values import varying_axes as varying_axes
