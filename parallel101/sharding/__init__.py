"""Arrays named by how they are sharded, and their products on real ranks.

    plan = p101.sharding.plan("A[I, J_X] · B[J, K] → C[I, K]", {"X": 4}, I=8, J=12, K=4)
    print(plan)                  # the collectives, their bytes and steps, and the alternatives
    plan.run(a_block, b_block)   # on each rank
    p101.sharding.run("A[I, J_X] · B[J, K] → C[I, K]", a, b, mesh={"X": 4}).picture()

notation.py        A[I_X, J_Y] {U_Z}: what the names mean
reshard.py         AllGather, ReduceScatter, AllReduce, AllToAll and Slice: from one sharding of an
                   array to another
sharding_plan.py   the steps of a product: their cost, and how they are run
choose.py          `plan`: the steps that send the fewest bytes
run.py             `run`: on ranks, compared with the whole product, and drawn
"""

from parallel101.sharding.choose import plan
from parallel101.sharding.notation import Sharding
from parallel101.sharding.reshard import ReshardStep
from parallel101.sharding.run import ShardedRun, run
from parallel101.sharding.sharding_plan import Multiply, ShardingPlan

__all__ = ["Multiply", "ReshardStep", "ShardedRun", "Sharding", "ShardingPlan", "plan", "run"]
