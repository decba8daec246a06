//! Messages to the user: lines on standard error that begin with the name of a task.

use std::fmt::{self, Display};
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use anyhow::Result;

/// Name of the task that works now.
static NAME: Mutex<String> = Mutex::new(String::new());

/// Prints a message like `println!`, with the name of the task in front.
macro_rules! say {
    ($($text:tt)*) => { $crate::messages::print(&format!($($text)*)) };
}
pub(crate) use say;

/// A command line that makes no sense. The exit code is 2.
#[derive(Debug)]
pub struct Refused(pub String);

impl Display for Refused {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} (--help lists the options)", self.0)
    }
}

impl std::error::Error for Refused {}

/// Returns an error from a task that got a command line without a meaning.
macro_rules! refuse {
    ($($text:tt)*) => { return Err($crate::messages::Refused(format!($($text)*)).into()) };
}
pub(crate) use refuse;

/// Prints `message` with the name of the task. Standard error may be closed.
pub fn print(message: &str) {
    let name = NAME.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let _ = writeln!(io::stderr().lock(), "{name}: {message}");
}

/// Runs `work` under the name `name`. After an error the name stays, for the error's message.
pub fn speak_as<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let previous = replace(name);
    let result = work()?;
    replace(&previous);
    Ok(result)
}

fn replace(name: &str) -> String {
    std::mem::replace(&mut *NAME.lock().unwrap_or_else(PoisonError::into_inner), name.to_owned())
}
