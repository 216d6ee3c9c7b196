"""The forecaster as a model of neuralforecast, beside NHITS, PatchTST and its other models.

    from neuralforecast import NeuralForecast
    from trellis.forecasting import TrellisForecast

    models = [TrellisForecast(h=96, input_size=512, max_steps=500)]
    forecasts = NeuralForecast(models=models, freq="h").fit(df).predict()

df is a frame with the columns unique_id, ds and y. Fitting, cross-validation, quantile losses,
exogenous columns, saving and loading are neuralforecast's own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

try:
    from neuralforecast.common._base_model import BaseModel
    from neuralforecast.core import MODEL_FILENAME_DICT
    from neuralforecast.losses.pytorch import MAE
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "neuralforecast":
        raise
    raise ImportError(
        "TrellisForecast needs neuralforecast: pip install 'trellis-memory[forecast]'"
    ) from error

from .model import ForecastConfig, ForecastModel


class TrellisForecast(BaseModel):
    """Patches of the input, blocks with a mixer of the registry, and a direct head.

    h: rows that are forecast. input_size: rows that a forecast is made from.
    patch, dim, layers, heads, mlp, mixer, mixer_config, dropout, linear: those of ForecastConfig.
    stat_exog_list, hist_exog_list, futr_exog_list: exogenous columns: one value for each series,
        known up to now, and known for the horizon as well.
    cat_exog_list, categorical_cardinalities, cat_emb_dim: which of these columns are categories,
        how many each has, and the width of their embeddings, as in neuralforecast's other models.
    loss: any loss of neuralforecast for points or quantiles, such as MAE() or MQLoss(level=[80]).
    All other arguments are those of every model of neuralforecast. Every window is normalised by
    its own mean and deviation, so scaler_type is "identity" by default; it applies to exogenous
    columns as well.
    """

    EXOGENOUS_FUTR = True
    EXOGENOUS_HIST = True
    EXOGENOUS_STAT = True
    EXOGENOUS_CAT = True
    MULTIVARIATE = False
    RECURRENT = False

    def __init__(
        self,
        h: int,
        input_size: int,
        stat_exog_list: list[str] | None = None,
        hist_exog_list: list[str] | None = None,
        futr_exog_list: list[str] | None = None,
        cat_exog_list: list[str] | None = None,
        categorical_cardinalities: dict[str, int] | None = None,
        cat_emb_dim: str | int = "fastai",
        exclude_insample_y: bool = False,
        patch: int = 16,
        dim: int = 64,
        layers: int = 2,
        heads: int = 4,
        mlp: int | None = None,
        mixer: str = "trellis",
        mixer_config: dict[str, Any] | None = None,
        dropout: float = 0.1,
        linear: bool = True,
        loss: Any = MAE(),  # noqa: B008, like every model of neuralforecast
        valid_loss: Any = None,
        max_steps: int = 1000,
        learning_rate: float = 1e-3,
        num_lr_decays: int = 3,
        early_stop_patience_steps: int = -1,
        val_monitor: str = "ptl/val_loss",
        val_check_steps: int = 100,
        batch_size: int = 32,
        valid_batch_size: int | None = None,
        windows_batch_size: int = 256,
        inference_windows_batch_size: int = 1024,
        start_padding_enabled: bool = False,
        training_data_availability_threshold: float = 0.0,
        step_size: int = 1,
        scaler_type: str = "identity",
        random_seed: int = 1,
        drop_last_loader: bool = False,
        alias: str | None = None,
        optimizer: Any = None,
        optimizer_kwargs: Any = None,
        lr_scheduler: Any = None,
        lr_scheduler_kwargs: Any = None,
        dataloader_kwargs: Any = None,
        **trainer_kwargs: Any,
    ):
        super().__init__(
            h=h,
            input_size=input_size,
            stat_exog_list=stat_exog_list,
            hist_exog_list=hist_exog_list,
            futr_exog_list=futr_exog_list,
            cat_exog_list=cat_exog_list,
            categorical_cardinalities=categorical_cardinalities,
            cat_emb_dim=cat_emb_dim,
            exclude_insample_y=exclude_insample_y,
            loss=loss,
            valid_loss=valid_loss,
            max_steps=max_steps,
            learning_rate=learning_rate,
            num_lr_decays=num_lr_decays,
            early_stop_patience_steps=early_stop_patience_steps,
            val_monitor=val_monitor,
            val_check_steps=val_check_steps,
            batch_size=batch_size,
            valid_batch_size=valid_batch_size,
            windows_batch_size=windows_batch_size,
            inference_windows_batch_size=inference_windows_batch_size,
            start_padding_enabled=start_padding_enabled,
            training_data_availability_threshold=training_data_availability_threshold,
            step_size=step_size,
            scaler_type=scaler_type,
            random_seed=random_seed,
            drop_last_loader=drop_last_loader,
            alias=alias,
            optimizer=optimizer,
            optimizer_kwargs=optimizer_kwargs,
            lr_scheduler=lr_scheduler,
            lr_scheduler_kwargs=lr_scheduler_kwargs,
            dataloader_kwargs=dataloader_kwargs,
            **trainer_kwargs,
        )
        if self.loss.is_distribution_output:
            raise ValueError(
                "loss must be of points or quantiles, such as MAE() or MQLoss(level=[80]); got "
                f"{type(self.loss).__name__}, whose outputs are the parameters of a distribution"
            )
        config = ForecastConfig(
            horizon=h,
            lookback=input_size,
            patch=min(patch, input_size),
            dim=dim,
            layers=layers,
            heads=heads,
            mlp=mlp,
            mixer=mixer,
            mixer_config=mixer_config or {},
            dropout=dropout,
            linear=linear,
            past=self.hist_exog_size,
            future=self.futr_exog_size,
            static=self.stat_exog_size,
        )
        self.forecaster = ForecastModel(config, outputs=self.loss.outputsize_multiplier)

    def forward(self, windows_batch: dict[str, Tensor]) -> Tensor:
        """The forecasts [B, h, outputs of the loss] of a batch of windows."""
        out = self.forecaster(
            windows_batch["insample_y"],
            mask=windows_batch["insample_mask"],
            past=windows_batch["hist_exog"],
            future=windows_batch["futr_exog"],
            static=windows_batch["stat_exog"],
        )
        return out[:, :, 0]


# By this name NeuralForecast.save and NeuralForecast.load find the class.
MODEL_FILENAME_DICT.setdefault("trellisforecast", TrellisForecast)
