"""Roles of a session: who contributes, who observes, whose anchor is wrong."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.outer.sync.roles import Role, assign_roles
from dilocox.outer.wan.base import Member

SYNC = Member(0, "sync", "run", "print", num_contributions=6, outer_step=3, fragment=1, anchor_hash="a")


def members(*changes):
    return [replace(SYNC, island=island, **change) for island, change in enumerate(changes)]


def roles_of(*changes):
    infos = members(*changes)
    roles = assign_roles(infos)
    return [roles.of(member.island) for member in infos], roles


C, O, D = Role.CONTRIBUTE, Role.OBSERVE, Role.DIVERGED  # noqa: E741


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ([{}, {}, {}], [C, C, C]),
        ([{}, {"kind": "observe", "anchor_hash": ""}, {}], [C, O, C]),
        ([{"outer_step": 2}, {}, {}], [O, C, C]),
        ([{"fragment": 0}, {}], [O, C]),
        # inner steps do not matter: unequal speeds are fine
        ([{"inner_step": 70}, {"inner_step": 3}], [C, C]),
        # the largest group is right; of two groups the one with more tokens, then the lower id
        ([{"anchor_hash": "b"}, {}, {}], [D, C, C]),
        ([{"anchor_hash": "b"}, {"num_tokens": 9}], [D, C]),
        ([{"anchor_hash": "b"}, {}], [C, D]),
        # an island with an earlier fragment is compared when it asks for the same one
        ([{"fragment": 0, "anchor_hash": "c"}, {}], [O, C]),
        # a joining island says the hashes of all fragments
        ([{}, {"kind": "join", "anchor_hash": "x,a"}], [C, O]),
        ([{}, {"kind": "join", "anchor_hash": "a,b"}], [C, D]),
    ],
)
def test_roles(changes, wanted):
    assert roles_of(*changes)[0] == wanted


def test_only_contributors_have_a_weight():
    infos = members({"weight": 2.0}, {"weight": 3.0, "anchor_hash": "b"}, {"weight": 4.0})
    assert assign_roles(infos).weights(infos) == [2.0, 0.0, 4.0]


def test_without_a_pseudo_gradient_there_are_no_roles():
    assert assign_roles(members({"kind": "join"}, {"kind": "observe"})) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sync", "join", "observe"]),
            st.integers(0, 2),
            st.integers(1, 2),
            st.integers(0, 1),
            st.sampled_from(["a", "b"]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_somebody_contributes_and_all_contributors_agree(infos):
    """The islands that are right sync in every session: they wait for none of the others."""
    found = [
        Member(i, kind, "run", "print", num_contributions=n, outer_step=s, fragment=f, anchor_hash=h)
        for i, (kind, n, s, f, h) in enumerate(infos)
    ]
    roles = assign_roles(found)
    if roles is None:
        assert all(member.kind != "sync" for member in found)
        return
    contributing = [member for member in found if member.island in roles.contributors]
    assert roles.leader in contributing
    assert len({(m.turn, m.num_contributions, m.anchor_hash) for m in contributing}) == 1
    assert not roles.contributors & roles.diverged
