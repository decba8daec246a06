//! Parses JSON into sections. Errors name the field, its value and the expected form.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde_json::{Map, Number, Value};
use thiserror::Error;

use super::{Refused, Unknown};
use crate::error::ConfigError;

/// Error in a JSON value. The text is one line.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FieldError {
    /// The text is not JSON, or contains a key twice.
    #[error("{0}")]
    Syntax(String),
    #[error("{path} is missing")]
    Missing { path: String },
    /// A value has the wrong type, or is outside the range of its type.
    #[error("{} is {value}, and must be {expected}", if .path.is_empty() { "it" } else { .path })]
    Wrong {
        /// Path of the field. Empty for the whole body.
        path: String,
        value: String,
        /// Form or range of valid values.
        expected: String,
    },
}

/// Error in a JSON body.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum JsonError {
    #[error(transparent)]
    Field(#[from] FieldError),
    /// A field is not supported, or the configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

pub trait JsonValue: Sized {
    /// Parses a value that is not null.
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError>;

    /// Value for a key that is not given. `None` if the key is required.
    fn absent() -> Option<Self> {
        None
    }

    /// Returns true if a key with this value is omitted when JSON is written.
    fn is_absent(&self) -> bool {
        false
    }
}

/// JSON object with a table of keys.
pub trait Object: JsonValue {
    /// Flag or API call that errors name.
    const FLAG: &'static str;
    /// True to refuse unknown keys instead of ignoring them.
    const STRICT: bool = false;
    /// Keys that are refused unless their value is neutral.
    const REFUSED: &'static [&'static [Refused]] = &[];

    fn names() -> Vec<&'static str>;

    /// Removes the section's keys from an object and parses them.
    fn take(object: &mut Map<String, Value>, walk: &mut Walk) -> Result<Self, JsonError>;

    /// Writes the section's keys into an object.
    fn write<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error>;
}

/// State of a parser: the path to the current value, and the collected warnings.
#[derive(Debug, Default)]
pub struct Walk {
    path: String,
    flag: Option<&'static str>,
    is_answer: bool,
    unknown: Unknown,
    warnings: Vec<String>,
}

impl Walk {
    /// Creates a parser state for a response of a VMM. Unknown fields cause no warnings, because
    /// the VMM may be newer.
    pub fn of_answer() -> Self {
        Self { is_answer: true, ..Self::default() }
    }

    /// Parses all values of an object whose keys are arbitrary names. Null counts as not given.
    pub fn entries<T>(
        &mut self,
        json: Value,
        read: impl Fn(Value, &mut Self) -> Result<T, JsonError>,
    ) -> Result<BTreeMap<String, T>, JsonError> {
        let Value::Object(object) = json else { return Err(self.wrong(&json, "an object")) };
        let given = object.into_iter().filter(|(_, json)| !json.is_null());
        given
            .map(|(key, json)| {
                let value = self.within(Step::Key(&key), |walk| read(json, walk))?;
                Ok((key, value))
            })
            .collect()
    }

    /// Parses an object at the current path.
    pub fn object<T: Object>(&mut self, json: Value) -> Result<T, JsonError> {
        let Value::Object(mut object) = json else { return Err(self.wrong(&json, "an object")) };
        if !self.is_answer {
            self.check::<T>(&object)?;
        }
        T::take(&mut object, self)
    }

    fn check<T: Object>(&mut self, object: &Map<String, Value>) -> Result<(), ConfigError> {
        let (names, flag) = (T::names(), self.flag.unwrap_or(T::FLAG));
        for (key, value) in object {
            if value.is_null() || names.contains(&&**key) {
                continue;
            }
            match Refused::find(T::REFUSED, key) {
                Some(refused) if refused.is_neutral_json(value) => {}
                Some(refused) => return Err(refused.error(flag, format!("={value}"))),
                None if T::STRICT => {
                    let known = names.join(", ");
                    return Err(ConfigError::UnknownKey { flag, key: key.clone(), known });
                }
                None => self.unknown.add(&self.path, key),
            }
        }
        Ok(())
    }

    /// Removes a key from an object and parses it. Null counts as not given.
    pub fn take<T: JsonValue>(
        &mut self,
        object: &mut Map<String, Value>,
        name: &'static str,
    ) -> Result<Option<T>, JsonError> {
        self.take_with(object, name, T::from_json)
    }

    /// Removes a key from an object and parses it with `read`.
    pub fn take_with<T>(
        &mut self,
        object: &mut Map<String, Value>,
        name: &'static str,
        read: impl FnOnce(Value, &mut Self) -> Result<T, JsonError>,
    ) -> Result<Option<T>, JsonError> {
        match object.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(json) => self.within(Step::Key(name), |walk| read(json, walk)).map(Some),
        }
    }

    fn within<T>(
        &mut self,
        step: Step<'_>,
        read: impl FnOnce(&mut Self) -> Result<T, JsonError>,
    ) -> Result<T, JsonError> {
        let length = self.path.len();
        self.path = step.after(&self.path);
        let value = read(self)?;
        self.path.truncate(length);
        Ok(value)
    }

    /// Calls `read`. Meanwhile, errors name `flag` instead of the type's own flag.
    pub fn named<T>(&mut self, flag: &'static str, read: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.flag.replace(flag);
        let value = read(self);
        self.flag = before;
        value
    }

    /// Adds a warning unless the same warning was added before.
    pub fn warn(&mut self, warning: &str) {
        if !self.warnings.iter().any(|other| other == warning) {
            self.warnings.push(warning.to_owned());
        }
    }

    /// Returns all warnings, first those about unknown fields.
    pub fn into_warnings(self) -> Vec<String> {
        self.unknown.warning().into_iter().chain(self.warnings).collect()
    }

    /// Returns the error for a wrong value at the current path.
    pub fn wrong(&self, json: &Value, expected: impl Into<String>) -> JsonError {
        let value = match json {
            Value::Array(_) => "a list".to_owned(),
            Value::Object(_) => "an object".to_owned(),
            Value::String(text) => format!("{text:?}"),
            Value::Null | Value::Bool(_) | Value::Number(_) => json.to_string(),
        };
        FieldError::Wrong { path: self.path.clone(), value, expected: expected.into() }.into()
    }

    /// Returns the value for a key that is not given and has no default.
    pub fn absent<T: JsonValue>(&self, name: &'static str) -> Result<T, JsonError> {
        T::absent().ok_or_else(|| self.missing(name))
    }

    /// Returns the error for a required key that is not given.
    pub fn missing(&self, name: &'static str) -> JsonError {
        FieldError::Missing { path: Step::Key(name).after(&self.path) }.into()
    }
}

/// Step of a path.
enum Step<'a> {
    Key(&'a str),
    Index(usize),
}

impl Step<'_> {
    fn after(&self, path: &str) -> String {
        match self {
            // Clients may send any characters, but an error must be one line.
            Self::Key(key) if path.is_empty() => key.escape_debug().to_string(),
            Self::Key(key) => format!("{path}.{}", key.escape_debug()),
            Self::Index(index) => format!("{path}[{index}]"),
        }
    }
}

impl<T: JsonValue> JsonValue for Option<T> {
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
        T::from_json(json, walk).map(Some)
    }

    fn absent() -> Option<Self> {
        Some(None)
    }

    fn is_absent(&self) -> bool {
        self.is_none()
    }
}

impl<T: JsonValue> JsonValue for Vec<T> {
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
        let Value::Array(list) = json else { return Err(walk.wrong(&json, "a list")) };
        let items = list.into_iter().enumerate();
        items
            .map(|(nth, item)| walk.within(Step::Index(nth), |walk| T::from_json(item, walk)))
            .collect()
    }

    fn absent() -> Option<Self> {
        Some(Self::new())
    }

    fn is_absent(&self) -> bool {
        self.is_empty()
    }
}

impl JsonValue for bool {
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
        json.as_bool().ok_or_else(|| walk.wrong(&json, "true or false"))
    }
}

macro_rules! number_value {
    ($($Number:ty)*) => { $(
        impl JsonValue for $Number {
            fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
                let number = json.as_u64().and_then(|number| Self::try_from(number).ok());
                number.ok_or_else(|| walk.wrong(&json, format!("a whole number from 0 to {}", Self::MAX)))
            }
        }
    )* };
}

number_value!(u8 u16 u32 u64 usize);

impl JsonValue for String {
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
        match json {
            Value::String(text) => Ok(text),
            other => Err(walk.wrong(&other, "a string")),
        }
    }
}

impl JsonValue for PathBuf {
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
        match json {
            Value::String(text) => Ok(text.into()),
            other => Err(walk.wrong(&other, "a path")),
        }
    }
}

/// Keeps an object unparsed, so that it can be parsed later.
impl JsonValue for Map<String, Value> {
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
        match json {
            Value::Object(object) => Ok(object),
            other => Err(walk.wrong(&other, "an object")),
        }
    }
}

/// Parses a JSON body. Returns the value with warnings about the body.
pub fn read_body<T: JsonValue>(bytes: &[u8]) -> Result<(T, Vec<String>), JsonError> {
    let body: Body =
        serde_json::from_slice(bytes).map_err(|error| FieldError::Syntax(error.to_string()))?;
    let mut walk = Walk::default();
    let value = T::from_json(body.0, &mut walk)?;
    Ok((value, walk.into_warnings()))
}

/// JSON value that refuses duplicate keys. `Value` would keep the last duplicate.
struct Body(Value);

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(BodyVisitor).map(Self)
    }
}

struct BodyVisitor;

impl<'de> Visitor<'de> for BodyVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Body(value)) = from.next_element()? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = from.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(A::Error::custom(format_args!(
                    "{} is given twice",
                    key.escape_debug()
                )));
            }
            let Body(value) = from.next_value()?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}
