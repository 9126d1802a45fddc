"""The handlers of an ordinary project with FedAvg."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from own.task import LR, Net, load_data, test
from own.task import train as train_fn

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = load_data(context.node_config["partition-id"])
    loss = train_fn(net, loader, LR)
    metrics = MetricRecord({"loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, loader = load_data(context.node_config["partition-id"])
    loss, accuracy = test(net, loader)
    metrics = {"loss": loss, "accuracy": accuracy, "num-examples": len(loader.dataset)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
