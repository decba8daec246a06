//! Calls about the governor.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use foreshore_config::ConfigError;

use crate::api::body::JsonBody;
use crate::api::error::ApiError;
use crate::governor::info::{PressureChange, PressureInfo};
use crate::vm::decision::{DECISIONS_SHOWN, MAX_DECISIONS};
use crate::vm::request::{VmHandle, VmRequest};

/// Name of the call in error messages.
const CALL: &str = "vm.pressure";

pub(super) async fn show(
    State(vm): State<VmHandle>,
    uri: Uri,
) -> Result<Json<PressureInfo>, ApiError> {
    let decisions = decisions(uri.query().unwrap_or_default())?;
    Ok(Json(vm.ask(|reply| VmRequest::Pressure(decisions, reply)).await?))
}

pub(super) async fn change(
    State(vm): State<VmHandle>,
    JsonBody(change): JsonBody<PressureChange>,
) -> Result<StatusCode, ApiError> {
    change.check(CALL)?;
    vm.ask(|reply| VmRequest::ChangePressure(change, reply)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Parses `decisions=N`, the only supported query parameter.
fn decisions(query: &str) -> Result<usize, ConfigError> {
    let mut count = None;
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        if key != "decisions" {
            let known = "decisions=".to_owned();
            return Err(ConfigError::UnknownKey { flag: CALL, key: key.to_owned(), known });
        }
        let digits = value.bytes().all(|byte| byte.is_ascii_digit());
        let read = value.parse().ok().filter(|read| digits && (0..=MAX_DECISIONS).contains(read));
        let Some(read) = read else {
            return Err(ConfigError::BadValue {
                flag: CALL,
                key: key.to_owned(),
                value: value.to_owned(),
                expected: format!("a whole number from 0 to {MAX_DECISIONS}"),
            });
        };
        if count.replace(read).is_some() {
            return Err(ConfigError::Duplicate { flag: CALL, key: key.to_owned() });
        }
    }
    Ok(count.unwrap_or(DECISIONS_SHOWN))
}
