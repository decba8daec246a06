//! Pressure policies and the controller that turns reports into plans.
