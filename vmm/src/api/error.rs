//! Errors of requests, and their HTTP status codes.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use balloon::governor::ResizeTargetError;
use foreshore_config::{ConfigError, JsonError};
use thiserror::Error;

use super::refusal_log::RefusalReason;
use crate::governor::GovernorError;
use crate::vm::request::VmError;

#[derive(Debug, Error)]
pub enum ApiError {
    #[error("no such call: {0}")]
    UnknownCall(String),
    /// A call of Cloud Hypervisor that Foreshore does not support.
    #[error("{call} is not supported by foreshore: {why}")]
    Unsupported {
        call: &'static str,
        /// Reason for the refusal.
        why: &'static str,
    },
    #[error("{path} does not support {method}")]
    WrongMethod { method: String, path: String },
    #[error("at most {most} clients can follow events; disconnect one of them first")]
    TooManyFollowers { most: usize },
    /// The body is incomplete or too large.
    #[error("cannot read the body of the request: {reason}")]
    Body {
        /// Status of the answer.
        status: StatusCode,
        reason: String,
    },
    /// The body is not valid JSON for the call.
    #[error("invalid body of the request: {0}")]
    Json(String),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Vm(#[from] VmError),
}

impl From<JsonError> for ApiError {
    fn from(error: JsonError) -> Self {
        match error {
            JsonError::Field(error) => Self::Json(error.to_string()),
            JsonError::Config(error) => Self::Config(error),
        }
    }
}

impl ApiError {
    /// HTTP status as in Cloud Hypervisor: 404 for a missing VM or disk, 405 if the state forbids
    /// the call.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::UnknownCall(_)
            | Self::Vm(
                VmError::NotCreated
                | VmError::NoSuchDisk { .. }
                | VmError::NoSuchPool { .. }
                | VmError::NoSuchDevice { .. },
            ) => StatusCode::NOT_FOUND,
            Self::WrongMethod { .. }
            | Self::Vm(
                VmError::WrongState { .. } | VmError::PauseEnded { .. } | VmError::AlreadyCreated,
            ) => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooManyFollowers { .. }
            | Self::Vm(VmError::VcpusLeaving { .. } | VmError::DeviceLeaving { .. }) => {
                StatusCode::TOO_MANY_REQUESTS
            }
            Self::Unsupported { .. } => StatusCode::NOT_IMPLEMENTED,
            Self::Vm(
                VmError::CannotResume { .. }
                | VmError::IdTaken { .. }
                | VmError::Governor(GovernorError::NotResizable {
                    reason: ResizeTargetError::UnsupportedDriver,
                    ..
                })
                | VmError::NoRoomForDescriptors { .. },
            )
            | Self::Config(ConfigError::IdTaken { .. })
            | Self::Vm(VmError::Config(ConfigError::IdTaken { .. })) => StatusCode::CONFLICT,
            Self::Body { status, .. } => *status,
            Self::Json(_)
            | Self::Config(_)
            | Self::Vm(VmError::BadRequest(_) | VmError::Config(_) | VmError::Governor(_)) => {
                StatusCode::BAD_REQUEST
            }
            Self::Vm(VmError::Failed(_)) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Vm(VmError::Ending) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

impl IntoResponse for ApiError {
    /// The body is a JSON list of the error and its causes.
    fn into_response(self) -> Response {
        let causes =
            std::iter::successors(Some(&self as &dyn std::error::Error), |error| error.source());
        let chain: Vec<String> = causes.map(ToString::to_string).collect();
        let reason = Extension(RefusalReason(chain.join(": ")));
        (self.status(), reason, Json(chain)).into_response()
    }
}
