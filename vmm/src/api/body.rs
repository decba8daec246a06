//! JSON bodies of requests.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use foreshore_config::{JsonValue, read_body};
use tokio::time::timeout;

use super::error::ApiError;

/// Upper limit of the body of every call except `vm.create`.
pub(super) const MAX_BODY_BYTES: usize = 64 << 10;
/// Upper limit of the body of `vm.create`. A configuration has several hundred KiB if each of 254
/// vCPUs has a list of host CPUs.
pub(super) const MAX_CONFIG_BYTES: usize = 512 << 10;

/// Time limit from the head of a request to the end of its body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Parsed body of at most `MOST` bytes, with any content type. The content type is not checked,
/// because some clients of Cloud Hypervisor do not set it to JSON.
pub(super) struct JsonBody<T, const MOST: usize = MAX_BODY_BYTES>(pub T);

impl<S: Send + Sync, T: JsonValue, const MOST: usize> FromRequest<S> for JsonBody<T, MOST> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let call = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        // A body is refused before it is read if its announced length is too large.
        if request.body().size_hint().lower() > MOST as u64 {
            let reason = format!("it is longer than {MOST} bytes");
            return Err(ApiError::Body { status: StatusCode::PAYLOAD_TOO_LARGE, reason });
        }
        let read = timeout(BODY_TIMEOUT, Bytes::from_request(request, state)).await;
        let bytes = read
            .map_err(|_| ApiError::Body {
                status: StatusCode::REQUEST_TIMEOUT,
                reason: format!("it is incomplete after {} s", BODY_TIMEOUT.as_secs()),
            })?
            .map_err(|error| ApiError::Body {
                status: error.status(),
                reason: error.body_text(),
            })?;
        let (value, warnings) = parse(&bytes)?;
        for warning in warnings {
            tracing::warn!(call, "{warning}");
        }
        Ok(Self(value))
    }
}

/// Request body that the call ignores. The request body is read nevertheless, so that the client
/// can send another request on the connection. If part of the body stayed unread, the connection
/// would have to be closed.
pub(super) struct PassedOver;

impl<S: Send + Sync> FromRequest<S> for PassedOver {
    type Rejection = Infallible;

    async fn from_request(request: Request, state: &S) -> Result<Self, Infallible> {
        // A body that is too large or too late ends the connection.
        if request.body().size_hint().lower() <= MAX_BODY_BYTES as u64 {
            let _ = timeout(BODY_TIMEOUT, Bytes::from_request(request, state)).await;
        }
        Ok(Self)
    }
}

/// Parses a JSON object, and returns it with warnings about it.
fn parse<T: JsonValue>(bytes: &[u8]) -> Result<(T, Vec<String>), ApiError> {
    match bytes.trim_ascii_start().first() {
        Some(b'{') => Ok(read_body(bytes)?),
        Some(_) => Err(ApiError::Json("it is not a JSON object".to_owned())),
        None => Err(ApiError::Json("it is empty".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::vm::request::ResizeRequest;

    #[test]
    fn unknown_fields_are_ignored_with_a_warning() {
        let body = br#"{"desired_memory": {"x": 1}, "desired_ram": 4096}"#;
        let (body, warnings) = parse::<ResizeRequest>(body).unwrap();
        assert_eq!(body.desired_ram, Some(4096));
        assert_eq!(warnings, ["Ignored unknown field: desired_memory"]);
    }

    #[test]
    fn only_json_objects_are_accepted() {
        assert!(parse::<ResizeRequest>(b" {} ").is_ok());
        assert!(parse::<ResizeRequest>(br#"{"desired_ram": 2097152, "unknown": 1}"#).is_ok());
        let text = |bytes| parse::<ResizeRequest>(bytes).unwrap_err().to_string();
        assert!(text(b"").ends_with("it is empty"));
        assert!(text(b"[1, 2, 3]").ends_with("it is not a JSON object"));
        let assert_error = |bytes, message| {
            assert!(
                text(bytes).ends_with(&format!(": desired_ram is {message}")),
                "{}",
                text(bytes)
            )
        };
        assert_error(
            br#"{"desired_ram": "2G"}"#,
            r#""2G", and must be a whole number from 0 to 18446744073709551615"#,
        );
        assert_error(
            br#"{"desired_ram": -1}"#,
            "-1, and must be a whole number from 0 to 18446744073709551615",
        );
        assert!(text(br#"{"desired_ram": 1"#).contains("EOF"));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse::<ResizeRequest>(&bytes);
        }
    }
}
