"""The gradient log at agents: bounded, copied, and replayed."""

import torch
from msgspec.structs import replace

from geartrain.checkpoint.agent.recovery import Recovery
from geartrain.checkpoint.agent.server import AgentServer
from geartrain.checkpoint.ranges import StateRange
from geartrain.checkpoint.replay import (
    AppliedUpdate,
    ReplayTarget,
    read_hyperparameters,
    replay_steps,
)
from node_agents import (
    Trainer,
    addresses_of,
    connect_to,
    free_slot,
    logged_step,
    make_state,
    until_changed,
    until_heard,
)


def test_snapshot_and_log_give_the_last_step_back_at_a_peer(
    servers: list[AgentServer],
) -> None:
    model = torch.nn.Linear(7, 300, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = make_state(0)
    trainer = Trainer(servers[0].local_address, log_bytes=1 << 20)
    trainer.link.set_peers(addresses_of(servers), 1)
    start = model.weight.detach().clone()
    trainer.snapshot(3, {**state, "model/w": start})
    for step in (4, 5, 6):
        slot = free_slot(trainer.link)
        model.weight.grad = torch.randn(300, 7)
        record = logged_step(slot, step, model.weight.grad.reshape(-1))
        update = AppliedUpdate(groups=read_hyperparameters(optimizer), extras={"at": step})
        trainer.link.log(replace(record, update=update.to_json()))
        optimizer.step()

    def is_copied() -> bool:
        return [c.log_step for c in trainer.link.read_status().copies] == [6]

    until_changed(servers[0], is_copied, "the log at a peer")
    assert trainer.link.poll().logged_step == 6
    servers[0].close()

    recovery = Recovery(connect_to(servers[1:]))
    source = recovery.find([StateRange(name="model/w", start=0, stop=2100)])
    assert (source.base_step, source.step, source.lineage) == (3, 6, "l6")
    twin = torch.nn.Linear(7, 300, bias=False)
    with torch.no_grad():
        twin.weight.copy_(start)
    target = ReplayTarget(
        parameters={"model/w": twin.get_parameter("weight")},
        optimizer=torch.optim.AdamW(twin.parameters(), lr=0.5),
    )
    extras = replay_steps(target, recovery.logged_steps(source), source.base_lineage)
    assert extras == {"at": 6}
    assert torch.equal(twin.weight, model.weight)


def test_a_full_log_asks_for_a_snapshot_and_goes_on_after_it(
    servers: list[AgentServer],
) -> None:
    trainer = Trainer(servers[0].local_address, log_bytes=10_000)
    trainer.snapshot(1)

    def log(step: int) -> None:
        slot = free_slot(trainer.link)
        trainer.link.log(logged_step(slot, step, torch.randn(1000)))

    link = trainer.link
    for step in range(2, 7):
        log(step)
    until_heard(
        trainer.link, lambda: trainer.link.poll().log_bytes > 5000, "the log to fill"
    )
    until_heard(link, lambda: link.poll().wants_snapshot, "it to ask")
    assert servers[0].shelf.chain("d0").num_bytes <= 10_000
    trainer.snapshot(6)
    log(7)
    until_heard(
        trainer.link, lambda: trainer.link.poll().logged_step == 7, "the log to go on"
    )

    source = Recovery(connect_to(servers[:1])).find(
        [StateRange(name="model/w", start=0, stop=9)]
    )
    assert (source.base_step, source.step) == (6, 7)
