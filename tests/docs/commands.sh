# Every command that the documentation shows. tests/docs/test_commands.py runs each block
# between `begin` and `end` in a folder that has the repository's examples.

# begin install
make install
# end install

# begin probe
geartrain probe --fleet emulated:0.8,0.4,0.2,0.1
# end probe

# begin train
geartrain run --fleet emulated:0.8,0.4,0.2,0.1 examples/train_gpt.py \
    --steps 80 --global-batch-size 128 --eval-samples 512
# end train

# begin one device
python examples/train_gpt.py --steps 80 --global-batch-size 128 --eval-samples 512
# end one device

# begin report
geartrain report "$(ls -td runs/*/ | head -n 1)"
# end report

# begin plan
geartrain plan --fleet emulated:0.8,0.4,0.2 --explain -o plan.json examples/train_digits.py
# end plan

# begin pinned
geartrain run --fleet emulated:0.8,0.4,0.2 --plan plan.json examples/train_digits.py
# end pinned

# begin slow down
geartrain emulate set emulated:0 0.4
# end slow down

# begin torchrun
torchrun --nproc-per-node 2 examples/plain_loop_geartrain.py
# end torchrun

# begin plain
python examples/plain_loop_geartrain.py
# end plain
