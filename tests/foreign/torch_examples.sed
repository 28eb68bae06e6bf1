# Lets pytorch/examples' distributed examples run on CPUs, seeded and smaller, and print their losses:
#   sed -i -f torch_examples.sed ddp/example.py FSDP2/example.py tensor_parallelism/*.py
s/return has_gpu and gpu_count >= min_gpus/return True/
s/torch\.accelerator\.current_accelerator()\.type/"cpu"/
/torch\.accelerator\.set_device_index\|get_default_backend_for_device(acc)/d
s/acc = torch\.accelerator\.current_accelerator()/backend = "gloo"/
s/, device_id=device)/)/
s/\.to(rank)//
s/DDP(model, device_ids=\[rank\])/DDP(model)/
s/^\( *\)\(model\|tp_model\) = ToyModel()/\1torch.manual_seed(0)\n&/
s/^\( *\)model = Transformer.from_model_args/\1torch.manual_seed(0)\n&/
s/^\( *\)loss_fn(outputs, labels)\.backward()/\1loss = loss_fn(outputs, labels)\n\1print("loss", loss.item())\n\1loss.backward()/
s/^\( *\)loss\.backward()/\1print("loss", loss.item())\n&/
s/^\( *\)output\.sum()\.backward()/\1loss = output.sum()\n\1print("loss", getattr(loss, "full_tensor", lambda: loss)().item())\n\1loss.backward()/
s/n_layers=10/n_layers=2/
s/batch_size = 32$/batch_size = 4/
s/vocab_size=32000/vocab_size=1000/
s/dim=256, n_layers=2, n_heads=16/dim=64, n_layers=2, n_heads=4/
s/randint(32000, (8, 256)/randint(1000, (4, 32)/
/checkpointer\.save(model, optim)/d
