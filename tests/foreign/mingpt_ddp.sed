# puts trainer.py of torch's minGPT-ddp on CPUs, and lets it print each loss
/^import boto3/d
s/torch.accelerator.current_accelerator()/"cpu"/
s/f"{self.acc}:{self.local_rank}"/self.acc/
s/\.to(self.local_rank)/.to(self.device)/
s/, device_ids=\[self.local_rank\]//
s/pin_memory=True/pin_memory=False/
s/iter % 100 == 0/True/
