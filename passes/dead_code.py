"""Dead code elimination.

Legality: a node without users whose only effect is its result changes nothing when it goes. Random calls stay,
because each advances the generator that later calls draw from; writes and collectives stay. An assertion on a
data-dependent size goes together with the operation that made the size, once nothing else reads that
operation: the static form that replaced it cannot fail.
"""

from __future__ import annotations

from torch import fx

from .context import PassContext
from .effects import effect, host_read, is_assertion, is_size


def _impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return effect(node) not in (None, "host read")


def _only_asserted(node: fx.Node) -> bool:
    """Whether every use of ``node`` ends, through sizes alone, in assertions."""
    return all(is_assertion(user) or (is_size(user) and _only_asserted(user)) for user in node.users)


def _users_of_users(node: fx.Node, found: set[fx.Node]) -> set[fx.Node]:
    found.add(node)
    for user in node.users:
        _users_of_users(user, found)
    return found


def eliminate_dead_code(gm: fx.GraphModule, context: PassContext) -> int:
    """Remove what nothing reads, in place. Returns how many nodes went."""
    before = len(gm.graph.nodes)
    gm.graph.eliminate_dead_code(is_impure_node=_impure)
    for node in reversed(list(gm.graph.nodes)):
        if node.users and host_read(node) and _only_asserted(node):
            # Users come after what they read, so erasing from the back never leaves a dangling use.
            for erased in sorted(_users_of_users(node, set()), reverse=True):
                gm.graph.erase_node(erased)
    gm.graph.eliminate_dead_code(is_impure_node=_impure)
    return before - len(gm.graph.nodes)
