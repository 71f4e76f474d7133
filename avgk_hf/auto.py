"""Makes the Auto classes of transformers know this package's model; importing it is enough."""

from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, TimmWrapperImageProcessor
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration import AvgKConfig
from .modeling import AvgKForImageClassification
from .pipeline import TASK, AverageKImageClassificationPipeline

AutoConfig.register("avgk", AvgKConfig, exist_ok=True)
AutoModelForImageClassification.register(AvgKConfig, AvgKForImageClassification, exist_ok=True)
AutoImageProcessor.register(AvgKConfig, image_processor_classes={"pil": TimmWrapperImageProcessor}, exist_ok=True)
if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
    PIPELINE_REGISTRY.register_pipeline(
        TASK,
        pipeline_class=AverageKImageClassificationPipeline,
        pt_model=AutoModelForImageClassification,
        type="image",
    )
