//! The wrappers of the tasks, with copies of the files that they read in a directory of their own.

mod images;
mod signals;
mod tasks;
mod test_task;
mod tree;
